"""Encoder-decoder models: T5, BART, their kin, and Whisper. The decoder runs on our pages, the encoder is theirs.

It does not know requests, nor how a family lays out its layers (`dialects` does). The one trick: what is special about
such a model hangs on the sequence, not on the pass. The cache knows each sequence's source; the first pass that meets
one runs the encoder over it, alone and unpadded, and leaves the keys and values of cross-attention with the cache,
which drops them with the sequence. All else (chains, trees, chunks, batches of unequal sources) is the same ragged
forward as everywhere, so nothing above this file has a second way to run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import sdpa
from ..decoding.source import Source
from ..errors import ModelError
from ..paged.batch import Batch
from ..paged.cache import KVCache, LayerShape
from .architecture import eos_ids
from .base import Ends, ModelInfo, ModelOutput
from .decoder import chosen_layers
from .dialects import dialect_of
from .speech import FAMILIES as HEARING
from .speech import speech_of

Reading = list[tuple[Tensor, Tensor]]  # per layer keys and values of a source, [1, heads, tokens, width] each


class EncoderDecoder:
    """A `CausalLM` around a loaded transformers model, which stays usable.

    Raises ModelError for a family that is not known, a model without a head or a decoder start token, one that reads
    other tokens than it writes, and one that fails the self-check.
    """

    def __init__(self, model: Any, name: str = "", *, self_check: bool = True):
        self.model = model
        model.train(False)
        name = name or str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        head = model.get_output_embeddings()
        if head is None:
            kind = "AutoModelForSpeechSeq2Seq" if model.config.model_type in HEARING else "AutoModelForSeq2SeqLM"
            raise ModelError(f"{name}: {type(model).__name__} says no tokens; load it with {kind}")
        self.dialect = dialect_of(model, name)
        keys, num_ids = self.dialect.own[0].keys.weight, int(head.weight.shape[0])
        shape = self.dialect.source_shape
        hearing = None if shape is None else speech_of(model, name, shape, num_ids)
        self.info = ModelInfo(
            name=name,
            architecture=type(model).__name__,
            vocab_size=num_ids,
            context=self.dialect.context,
            layers=tuple(LayerShape(own.num_heads, own.width, own.width) for own in self.dialect.own),
            hidden_size=int(head.weight.shape[1]),
            num_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
            dtype=keys.dtype,
            device=keys.device,
            eos_ids=eos_ids(model),
            implementation="native",
            source_context=self.dialect.source_context,
            decoder_prompt=_decoder_prompt(model, name) if hearing is None else hearing.opening,
            speech=hearing,
        )
        if hearing is None:
            _refuse_two_vocabularies(model, self.info)
        if self_check:
            from .huggingface import check_against_stock

            check_against_stock(self, model)

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        return KVCache(self.info.layers, num_pages, page_size, dtype=self.info.dtype, device=self.info.device)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        dialect, tapped = self.dialect, dict[int, Tensor]()
        running = chosen_layers(len(self.info.layers), taps, layers)
        with _without_dropout(self.model):
            readings = [cache.reading(span.feed.sequence, self._read) for span in batch.spans]
            biases = dialect.biases(batch)
            x_TD = dialect.embed(batch.tokens_T, batch.positions_T)
            for i in running:
                own = partial(self._attend, i, batch, cache, None if biases is None else biases[i])
                cross = partial(self._look_up, i, batch, readings)
                x_TD = dialect.layer(i, x_TD, own, cross)
                if i in taps:
                    tapped[i] = x_TD
            return ModelOutput(dialect.logits(x_TD[batch.wanted_N]), tapped)

    def ends(self) -> Ends:
        raise ModelError(f"{self.info.name} is an encoder-decoder model; trained heads are for decoder-only models")

    def _read(self, source: Source) -> Reading:
        """The encoder's pass over one source: what cross-attention sees of it, for all layers."""
        states_SD = self.dialect.encode(source)
        return [
            (_by_head(cross.split(cross.keys(states_SD))), _by_head(cross.split(cross.values(states_SD))))
            for cross in self.dialect.cross
        ]

    def _attend(self, i: int, batch: Batch, cache: KVCache, biases: Sequence[Tensor] | None, x_TD: Tensor) -> Tensor:
        """A layer's attention over the decoder's own text; keys and values go into the pages."""
        own = self.dialect.own[i]
        keys, values = cache.keys[i], cache.values[i]
        keys[batch.slots_T] = own.split(own.keys(x_TD))
        values[batch.slots_T] = own.split(own.values(x_TD))
        q_THD = own.split(own.queries(x_TD))
        out_THD = sdpa.attend(q_THD, keys, values, batch, scale=own.scale, biases=biases)
        out_TD: Tensor = own.output(out_THD.flatten(1))
        return out_TD

    def _look_up(self, i: int, batch: Batch, readings: Sequence[Reading], x_TD: Tensor) -> Tensor:
        """A layer's attention over the sources, each row seeing all of its own."""
        cross = self.dialect.cross[i]
        q_THD = cross.split(cross.queries(x_TD))
        out_THD = torch.empty_like(q_THD)
        for span, reading in zip(batch.spans, readings, strict=True):
            q = _by_head(q_THD[span.start : span.stop])
            out = F.scaled_dot_product_attention(q, *reading[i], scale=cross.scale)
            out_THD[span.start : span.stop] = out[0].transpose(0, 1)
        out_TD: Tensor = cross.output(out_THD.flatten(1))
        return out_TD


def _by_head(x_RHD: Tensor) -> Tensor:
    return x_RHD.transpose(0, 1)[None].contiguous()


def _refuse_two_vocabularies(model: Any, info: ModelInfo) -> None:
    num_source_ids = int(model.get_encoder().get_input_embeddings().weight.shape[0])
    if num_source_ids != info.vocab_size:
        raise ModelError(
            f"{info.name}: its encoder knows {num_source_ids} tokens and its decoder {info.vocab_size}; models "
            "that read and write different vocabularies are not supported"
        )


def _decoder_prompt(model: Any, name: str) -> tuple[int, ...]:
    """The start token, and the one that the model's settings force behind it, if any (languages, in some)."""
    start, forced = _setting(model, "decoder_start_token_id"), _setting(model, "forced_bos_token_id")
    if not isinstance(start, int):
        raise ModelError(
            f"{name}: {type(model).__name__} has no decoder start token; set decoder_start_token_id in its config or "
            "generation config"
        )
    return (start, forced) if isinstance(forced, int) else (start,)


def _setting(model: Any, key: str) -> Any:
    value = getattr(model.generation_config, key, None)
    return getattr(model.config, key, None) if value is None else value


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Its owner may be training it; we never run dropout, and leave everything as it was."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
