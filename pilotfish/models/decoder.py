"""Our own decoder for Llama-shaped models in float: any dtype, any device, plain torch.

It does not know quantisation (`quantized` does) or how weights are stored. The one trick: a pass is a page of code;
queries, keys and values come from one product, gate and up from another, and there are no modules, hooks or cache
objects in between, which is half of what a small model's pass costs elsewhere.

It does step by step what transformers does, norms in float32 and all, so that the two agree to the last few bits.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import sdpa
from ..errors import ModelError
from ..paged.batch import Batch
from ..paged.cache import KVCache
from .architecture import Architecture, describe, eos_ids, weights
from .base import Ends, ModelInfo, ModelOutput


class Decoder:
    """A `CausalLM` of float weights. Raises ModelError for a model that is not Llama-shaped or fails the self-check.

    The Hugging Face model stays usable: its weights become views of the fused ones.
    """

    def __init__(self, model: Any, name: str = "", *, self_check: bool = True):
        facts = self.architecture = describe(model)
        model.train(False)
        self.weights = _adopt(model, facts)
        table = self.weights["embedding"]
        self.head_ND = self.weights["embedding" if facts.tied else "head"]
        self.info = ModelInfo(
            name=name or str(getattr(model.config, "name_or_path", "") or type(model).__name__),
            architecture=type(model).__name__,
            vocab_size=facts.vocab_size,
            context=facts.context,
            layers=facts.layer_shapes,
            hidden_size=facts.hidden_size,
            num_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            dtype=table.dtype,
            device=table.device,
            eos_ids=eos_ids(model),
            implementation="native",
        )
        if self_check:
            from .huggingface import check_against_stock

            check_against_stock(self, model)

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size, dtype=self.info.dtype, device=self.info.device)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        facts, w = self.architecture, self.weights
        running = chosen_layers(facts.num_layers, taps, layers)
        x_TD = F.embedding(batch.tokens_T, w["embedding"])
        if facts.embedding_scale != 1.0:
            x_TD = x_TD * facts.embedding_scale
        turns = [self._turns(batch.positions_T, table) for table in range(len(facts.rotation_scales))]
        tapped: dict[int, Tensor] = {}
        for i in running:
            out = self._attend(i, self._norm(x_TD, f"{i}.norm_1"), batch, cache, turns[facts.rotations[i]])
            x_TD = x_TD + self._norm(out, f"{i}.post_1")
            gate, up = self._linear(self._norm(x_TD, f"{i}.norm_2"), f"{i}.gate_up").chunk(2, dim=-1)
            active = F.silu(gate) if facts.activation == "silu" else F.gelu(gate, approximate="tanh")
            x_TD = x_TD + self._norm(self._linear(active * up, f"{i}.down"), f"{i}.post_2")
            if i in taps:
                tapped[i] = x_TD
        return ModelOutput(F.linear(self._norm(x_TD[batch.wanted_N], "norm"), self.head_ND), tapped)

    def with_head(self, ids: Sequence[int]) -> "Decoder":
        """See `vocabulary.with_head`."""
        twin = copy.copy(self)
        twin.head_ND = self.head_ND[torch.tensor(ids, device=self.info.device)]
        return twin

    def ends(self) -> Ends:
        table, head = self.weights["embedding"], self.weights["embedding" if self.architecture.tied else "head"]
        return Ends(
            embed=lambda tokens_T: F.embedding(tokens_T, table).float(),
            norm=lambda states_TD: self._norm(states_TD.to(self.info.dtype), "norm").float(),
            head_rows=lambda ids_N: F.embedding(ids_N, head).float(),
        )

    def _attend(self, i: int, x_TD: Tensor, batch: Batch, cache: KVCache, turns: tuple[Tensor, Tensor]) -> Tensor:
        facts, rows = self.architecture, x_TD.shape[0]
        heads = [facts.num_heads, facts.num_key_heads, facts.num_key_heads]
        heads_THD = self._linear(x_TD, f"{i}.qkv").view(rows, -1, facts.head_dim)
        q_THD, k_TGD, v_TGD = torch.split(heads_THD, heads, dim=1)
        q_THD, k_TGD = self._norm(q_THD, f"{i}.q_norm"), self._norm(k_TGD, f"{i}.k_norm")
        keys, values = cache.keys[i], cache.values[i]
        keys[batch.slots_T] = rotated(k_TGD, *turns)
        values[batch.slots_T] = v_TGD
        out_THD = sdpa.attend(
            rotated(q_THD, *turns), keys, values, batch, scale=facts.attention_scale, window=facts.windows[i]
        )
        return self._linear(out_THD.reshape(rows, -1), f"{i}.o")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm by the weight of this name; x itself if the model has no such norm."""
        weight = self.weights.get(name)
        if weight is None:
            return x
        full = x.float()
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.architecture.norm_epsilon)
        return (full * weight).to(x.dtype) if self.architecture.float_norms else weight * full.to(x.dtype)

    def _turns(self, positions_T: Tensor, table: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D] for these positions, in the model's dtype."""
        frequencies, scale = self.weights[f"frequencies.{table}"], self.architecture.rotation_scales[table]
        angles = positions_T[:, None].float() * frequencies.float()
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        return (angles.cos() * scale).to(self.info.dtype), (angles.sin() * scale).to(self.info.dtype)


def rotated(x_THD: Tensor, cosines_T1D: Tensor, sines_T1D: Tensor) -> Tensor:
    """Each head's halves, rotated against each other by the row's position."""
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cosines_T1D + torch.cat([-second, first], dim=-1) * sines_T1D


def chosen_layers(num_layers: int, taps: Sequence[int], layers: Sequence[int] | None) -> Sequence[int]:
    """The layers that run. Raises ModelError for one that does not exist, or a tap where none runs."""
    running = range(num_layers) if layers is None else layers
    assert list(running) == sorted(set(running)), "layers ascend"
    if odd := [layer for layer in running if not 0 <= layer < num_layers]:
        raise ModelError(f"layer {odd[0]} cannot be run alone: the model has layers 0 to {num_layers - 1}")
    if odd := [layer for layer in taps if layer not in running]:
        raise ModelError(f"layer {odd[0]} cannot be tapped: of layers 0 to {num_layers - 1}, {len(running)} run")
    return running


def _adopt(model: Any, facts: Architecture) -> Mapping[str, Tensor]:
    """The fused weights. Where parts had to be joined, the model's own parameters become views of the result."""
    adopted = {}
    for name, parts in weights(model, facts):
        if len(parts) == 1:
            adopted[name] = parts[0].detach()
            continue
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
            part.data = view
        adopted[name] = whole
    return adopted
