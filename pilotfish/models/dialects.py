"""How families of encoder-decoder models lay out a decoder layer: T5's way and BART's way, said in the same few words;
Whisper's is BART's behind another encoder.

It does not know pages, sources or passes: it is handed two attentions and puts norms, residuals and feed-forwards
around them. The one trick: the modules are transformers' own, found by the names they have had since the families came
out; nothing depends on how transformers runs them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.source import Features, Source
from ..errors import ModelError
from ..paged.batch import Batch, Span
from . import speech

UNBOUNDED = 1 << 20  # tokens, where positions are only relative
_POST_NORM, _PRE_NORM = ("bart", "marian"), ("mbart", "pegasus")

Attend = Callable[[Tensor], Tensor]  # normed states [T, hidden] -> what attention adds to them, [T, hidden]


@dataclass(frozen=True, slots=True)
class Heads:
    """One attention's projections. num_heads of ``width`` each; scale: of the scores."""

    queries: Any
    keys: Any
    values: Any
    output: Any
    num_heads: int
    width: int
    scale: float

    def split(self, x_RD: Tensor) -> Tensor:
        """[R, heads, width]"""
        return x_RD.view(len(x_RD), self.num_heads, self.width)


class Dialect(ABC):
    """own, cross: per layer the attention over the text and over the source. context, source_context: longest text and
    source, in tokens. source_shape: of the features that the encoder reads, None if it reads tokens."""

    model: Any

    own: Sequence[Heads]
    cross: Sequence[Heads]
    context: int
    source_context: int
    source_shape: tuple[int, int] | None = None

    def encode(self, source: Source) -> Tensor:
        """The encoder's last states, [S, hidden]."""
        states_SD: Tensor = self.model.get_encoder()(**stock_inputs(source, self.own[0].keys.weight)).last_hidden_state[
            0
        ]
        return states_SD

    @abstractmethod
    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """What enters the first layer, [T, hidden]."""

    @abstractmethod
    def layer(self, i: int, x_TD: Tensor, own: Attend, cross: Attend) -> Tensor:
        """What leaves layer i, [T, hidden]."""

    @abstractmethod
    def logits(self, x_ND: Tensor) -> Tensor:
        """[N, V] of states that left the last layer."""

    def biases(self, batch: Batch) -> Sequence[Sequence[Tensor]] | None:
        """Per layer and span [heads, rows, keys], added to the scores over the text; None if there are none."""
        return None


def stock_inputs(source: Source, weight: Tensor) -> dict[str, Tensor]:
    """How transformers' encoders are given a source. weight: any of the model's, for device and dtype."""
    if isinstance(source, Features):
        return {"input_features": source.values[None].to(weight)}
    return {"input_ids": torch.tensor([source], device=weight.device)}


def dialect_of(model: Any, name: str) -> Dialect:
    """Raises ModelError for a family that speaks none of these."""
    family = str(model.config.model_type)
    kinds: tuple[type[T5 | Bart | Whisper], ...] = T5, Bart, Whisper
    for kind in kinds:
        if family in kind.FAMILIES:
            return kind(model)
    known = ", ".join(family for kind in kinds for family in kind.FAMILIES)
    raise ModelError(f"{name}: encoder-decoder models of family {family!r} are not supported; these are: {known}")


class T5(Dialect):
    """Norms in front, no scale, and a bias by distance instead of positions (Raffel et al. 2020, section 2.1)."""

    FAMILIES = ("t5", "mt5", "umt5", "longt5")

    def __init__(self, model: Any):
        self.model, self.blocks, config = model, list(model.decoder.block), model.config
        self.context = self.source_context = UNBOUNDED
        self.num_buckets = int(config.relative_attention_num_buckets)
        self.max_distance = int(config.relative_attention_max_distance)
        # T5 1.1 and mT5 keep their heads apart and do not scale for them; newer versions note that in a field.
        tied = config.model_type != "mt5" and config.tie_word_embeddings
        self.output_scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", tied) else 1.0
        self.own = [self._heads(block.layer[0].SelfAttention, config) for block in self.blocks]
        self.cross = [self._heads(block.layer[1].EncDecAttention, config) for block in self.blocks]

    @staticmethod
    def _heads(attention: Any, config: Any) -> Heads:
        return Heads(attention.q, attention.k, attention.v, attention.o, config.num_heads, config.d_kv, 1.0)

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD: Tensor = self.model.decoder.embed_tokens(tokens_T)
        return x_TD

    def layer(self, i: int, x_TD: Tensor, own: Attend, cross: Attend) -> Tensor:
        first, second, third = self.blocks[i].layer
        x_TD = _finite(x_TD + own(first.layer_norm(x_TD)))
        x_TD = _finite(x_TD + cross(second.layer_norm(x_TD)))
        return _finite(third(x_TD))

    def logits(self, x_ND: Tensor) -> Tensor:
        x_ND = self.model.decoder.final_layer_norm(x_ND)
        if self.output_scale != 1.0:
            x_ND = x_ND * self.output_scale
        logits_NV: Tensor = self.model.lm_head(x_ND)
        return logits_NV

    def biases(self, batch: Batch) -> Sequence[Sequence[Tensor]]:
        buckets = [self._buckets(span, batch.positions_T[span.start : span.stop]) for span in batch.spans]
        found: list[Sequence[Tensor]] = []
        for block in self.blocks:
            table = getattr(block.layer[0].SelfAttention, "relative_attention_bias", None)
            if table is None:  # the first layer's is for all
                found.append(found[0])
            else:
                found.append(
                    [F.embedding(bucket_RK, table.weight).permute(2, 0, 1).contiguous() for bucket_RK in buckets]
                )
        return found

    def _buckets(self, span: Span, positions_R: Tensor) -> Tensor:
        """Which row of the table of biases each key is for each row: distances are exact at first, then logarithmic."""
        distance_RK = (positions_R[:, None] - span.key_positions()[None, :]).clamp(min=0)
        exact = self.num_buckets // 2
        # In float32, whatever the model's dtype is: that is how the tables were trained.
        steps_RK = torch.log(distance_RK.float() / exact) / math.log(self.max_distance / exact)
        far_RK = exact + (steps_RK.clamp(min=0) * (self.num_buckets - exact)).long()
        return torch.where(distance_RK < exact, distance_RK, far_RK.clamp(max=self.num_buckets - 1))


def _finite(x_TD: Tensor) -> Tensor:
    """float16 overflows in large models of this family. Row by row: what else is in the batch makes no difference."""
    if x_TD.dtype != torch.float16:
        return x_TD
    most = torch.finfo(torch.float16).max - 1000
    return x_TD.clamp(min=-most, max=most)


class Bart(Dialect):
    """Absolute positions, learned or sinusoidal; norms behind (BART, Marian) or in front (mBART, Pegasus)."""

    FAMILIES: tuple[str, ...] = (*_POST_NORM, *_PRE_NORM)

    def __init__(self, model: Any):
        self.model, self.decoder = model, model.model.decoder
        self.layers = list(self.decoder.layers)
        self.post_norm = model.config.model_type in _POST_NORM
        self.context = self.source_context = int(model.config.max_position_embeddings)
        self.offset = int(getattr(self.decoder.embed_positions, "offset", 0))
        # Some scale inside of their embedding, others behind it.
        self.scale = float(getattr(self.decoder, "embed_scale", None) or 1.0)
        self.own = [self._heads(layer.self_attn) for layer in self.layers]
        self.cross = [self._heads(layer.encoder_attn) for layer in self.layers]

    @staticmethod
    def _heads(attention: Any) -> Heads:
        parts = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
        return Heads(*parts, attention.num_heads, attention.head_dim, attention.head_dim**-0.5)

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD: Tensor = self.decoder.embed_tokens(tokens_T) * self.scale
        x_TD = x_TD + F.embedding(positions_T + self.offset, self.decoder.embed_positions.weight)
        norm = getattr(self.decoder, "layernorm_embedding", None)
        return x_TD if norm is None else norm(x_TD)

    def layer(self, i: int, x_TD: Tensor, own: Attend, cross: Attend) -> Tensor:
        layer = self.layers[i]
        norms = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm
        parts: tuple[Attend, ...] = own, cross, lambda x_TD: layer.fc2(layer.activation_fn(layer.fc1(x_TD)))
        for norm, part in zip(norms, parts, strict=True):
            x_TD = norm(x_TD + part(x_TD)) if self.post_norm else x_TD + part(norm(x_TD))
        return x_TD

    def logits(self, x_ND: Tensor) -> Tensor:
        norm = getattr(self.decoder, "layer_norm", None)
        logits_NV: Tensor = self.model.lm_head(x_ND if norm is None else norm(x_ND)) + self.model.final_logits_bias
        return logits_NV


class Whisper(Bart):
    """mBART's layers behind an encoder that reads features, and nothing added to the logits (Radford et al. 2022)."""

    FAMILIES = speech.FAMILIES

    def __init__(self, model: Any):
        self.model, self.decoder, config = model, model.model.decoder, model.config
        self.layers, self.post_norm = list(self.decoder.layers), False
        self.context, self.source_context = int(config.max_target_positions), int(config.max_source_positions)
        encoder = model.model.encoder
        self.source_shape = (
            int(config.num_mel_bins),
            self.source_context * math.prod(convolution.stride[0] for convolution in (encoder.conv1, encoder.conv2)),
        )
        self.offset, self.scale = 0, 1.0
        self.own = [self._heads(layer.self_attn) for layer in self.layers]
        self.cross = [self._heads(layer.encoder_attn) for layer in self.layers]

    def logits(self, x_ND: Tensor) -> Tensor:
        logits_NV: Tensor = self.model.proj_out(self.decoder.layer_norm(x_ND))
        return logits_NV
