"""Attention of a ragged batch over paged keys, through torch's fused kernel, one call per sequence.

It falls to `reference` for what the kernel cannot do (soft caps, sinks). The one trick: pages that lie side by side
are read as views, so a sequence alone on the machine never copies its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..lazily import functional as F
from . import reference

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
    """As `reference.attend`."""
    if softcap is not None or sinks_H is not None:
        return reference.attend(
            q_THD,
            k_SGD,
            v_SGD,
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
            biases=biases,
        )
    out_THD = q_THD.new_empty(q_THD.shape[0], q_THD.shape[1], v_SGD.shape[2])
    grouped = q_THD.shape[1] != k_SGD.shape[1]
    for number, span in enumerate(batch.spans):
        q = q_THD[span.start : span.stop].transpose(0, 1)[None]
        k = k_SGD[span.key_slots].transpose(0, 1)[None]
        v = v_SGD[span.key_slots].transpose(0, 1)[None]
        mask = span.mask(window)
        if biases is not None:
            mask = biases[number] if mask is None else biases[number].masked_fill(~mask, float("-inf"))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        out_THD[span.start : span.stop] = out[0].transpose(0, 1)
    return out_THD
