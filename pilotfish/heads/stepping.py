"""One step of an EAGLE-3 head over rows on pages: what it feeds back, and its logits.

It does not know drafting. The one trick: to `QuantizedDecoder` a head is a model of one layer whose rows start from
given states, not from tokens alone; so with int8 weights a step is one compiled call, with the loops, threads, pages
and tree rows of a whole model. In any other case the head's own torch code does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..attention import sdpa
from ..models.architecture import Architecture
from ..models.linear import Array
from ..models.options import Kernels
from ..models.quantize import Origin, Quantised, obstacle
from ..models.quantized import QuantizedDecoder
from .eagle3 import Attend, Eagle3Head
from .layers import PackedProduct

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..paged.batch import Batch
    from ..paged.cache import KVCache

_PRODUCTS = {"qkv": "qkv", "o": "out", "gate_up": "gate_up", "down": "down"}
_NORMS = {"norm_1": "hidden_norm", "norm_2": "mlp_norm", "embedding_norm": "embedding_norm", "q_norm": "q_norm",
          "k_norm": "k_norm"}  # fmt: skip


class Steps:
    """Runs a head. native: what runs it as one compiled call, if that is possible. kernels: see `kernels.runner`."""

    def __init__(self, head: Eagle3Head, kernels: Kernels = "auto"):
        self.head, self.native = head, compiled(head, kernels)

    def run(self, batch: Batch, cache: KVCache, states_TD: Tensor) -> tuple[Tensor, Tensor]:
        """One pass: what each row feeds back [T, hidden], and the wanted rows' logits [N, draft vocabulary]. Keys and
        values land in the cache. states_TD: what each row starts from."""
        head = self.head
        if self.native is None:
            hidden_TD = head(batch.tokens_T, states_TD, batch.positions_T, self._attention(batch, cache))
            return hidden_TD, head.logits(hidden_TD[batch.wanted_N])
        starts = states_TD.contiguous(), head.embed(batch.tokens_T).to(states_TD.dtype).contiguous()
        output = self.native.forward(batch, cache, taps=(0,), starts=starts)
        hidden_TD = output.taps[0]
        return head.norm(hidden_TD) if head.config.norm_output else hidden_TD, output.logits_NV

    def _attention(self, batch: Batch, cache: KVCache) -> Attend:
        keys, values, scale = cache.keys[0], cache.values[0], self.head.config.head_dim**-0.5

        def attend(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            keys[batch.slots_T], values[batch.slots_T] = k_TGD, v_TGD
            return sdpa.attend(q_THD, keys, values, batch, scale=scale)

        return attend


def compiled(head: Eagle3Head, kernels: Kernels = "auto") -> QuantizedDecoder | None:
    """The same head for `QuantizedDecoder.forward` with ``starts``; None if its weights are not int8, or of shapes that
    the loops do not take. What it feeds back is the output of its layer (tap 0), without `norm_output`."""
    if any(_bits(_part(head, name)) != 8 for name in ("lm_head", *_PRODUCTS.values())):
        return None
    facts = _facts(head)
    if obstacle(facts):
        return None
    arrays: dict[str, Array] = {"frequencies.0": head.frequencies.numpy(), "norm": head.norm.weight.detach().numpy()}
    for name, own in _PRODUCTS.items():
        arrays |= _packed(f"0.{name}", _part(head, own))
    for name, own in _NORMS.items():
        norm = _part(head, own)
        if norm is not None:
            arrays[f"0.{name}"] = norm.weight.detach().numpy()  # type: ignore[operator]
    arrays |= _packed("head", head.lm_head) | _packed("embedding", head.lm_head)  # nobody looks up the latter
    origin = Origin(facts, type(head).__name__, (), 8)
    joined = 2 if head.config.norm_before_residual else 1
    return QuantizedDecoder(Quantised(origin, arrays), "head", joined=joined, kernels=kernels)


def _facts(head: Eagle3Head) -> Architecture:
    config = head.config
    return Architecture(
        family="eagle3",
        vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_key_heads=config.num_key_heads,
        head_dim=config.head_dim,
        context=config.context,
        norm_epsilon=config.norm_epsilon,
        attention_scale=config.head_dim**-0.5,
        embedding_scale=1.0,
        activation="silu",
        windows=(None,),
        rotations=(0,),
        rotation_scales=(head.rope_scale,),
        tied=False,
        float_norms=False,
    )


def _part(head: Eagle3Head, name: str) -> nn.Module | None:
    part: nn.Module | None = getattr(head, name, None)
    return part


def _bits(module: nn.Module | None) -> int:
    return module.product.packed.bits if isinstance(module, PackedProduct) else 0


def _packed(name: str, module: nn.Module | None) -> dict[str, Array]:
    assert isinstance(module, PackedProduct)
    packed = module.product.packed
    return {f"{name}.weights": packed.weights, f"{name}.scales": packed.scales, f"{name}.bias": packed.bias}
