"""Attention of a ragged batch over paged keys, in plain torch: the definition of correct.

It does not know models or requests. It is written to be read, not to be fast; every other implementation is tested
against it. The one trick: sinks are one more column of the softmax whose value is nothing.

Shapes: T rows, S slots, H query heads, G key heads (H a multiple of G), D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..lazily import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..paged.batch import Batch


def attend(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    biases: Sequence[Tensor] | None = None,
) -> Tensor:
    """[T, H, D_v]. A row sees the keys its span allows, at most ``window`` positions back (itself counted).

    softcap: scores become softcap * tanh(scores / softcap) (Gemma 2). sinks_H: one extra logit per head that takes
    its share of the softmax and adds nothing (gpt-oss). biases: per span [H, rows, keys], added to the scores (T5).
    """
    out_THD = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], v_SGD.shape[2])
    for number, span in enumerate(batch.spans):
        q, k, v = q_THD[span.start : span.stop], k_SGD[span.key_slots], v_SGD[span.key_slots]
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores_HRK = torch.einsum("rhd,khd->hrk", q, k) * scale
        if softcap is not None:
            scores_HRK = torch.tanh(scores_HRK / softcap) * softcap
        if biases is not None:
            scores_HRK = scores_HRK + biases[number]
        mask_RK = span.mask(window)
        if mask_RK is not None:
            scores_HRK = scores_HRK.masked_fill(~mask_RK, float("-inf"))
        if sinks_H is not None:
            sinks_HR1 = sinks_H[:, None, None].expand(-1, scores_HRK.shape[1], 1).to(scores_HRK.dtype)
            weights_HRK = torch.cat([scores_HRK, sinks_HR1], 2).softmax(2)[..., :-1]
        else:
            weights_HRK = scores_HRK.softmax(2)
        out_THD[span.start : span.stop] = torch.einsum("hrk,khd->rhd", weights_HRK, v)
    return out_THD
