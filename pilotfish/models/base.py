"""What the engine and the drafters need of a model: `CausalLM`, a cache to fill and one ragged forward.

It does not know any architecture. The one trick: prefill, verification and a draft model's catch-up are the same
call, so a model has exactly one way to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..decoding.source import Features, Source
from ..errors import PromptError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..decoding.sampling import Likeliest, SamplingParams
    from ..paged.batch import Batch
    from ..paged.cache import KVCache, LayerShape
    from .options import Kernels
    from .speech import Speech


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model.

    name: as the user gave it. context: the longest text it takes, in tokens. eos_ids: what ends a text.
    num_bytes: of its weights. quantization: how they are kept (none, int8, int4). bitwise: whether a row's logits are
    the same to the last bit whatever else is in the batch. implementation: hf (transformers' code) or native (ours).
    kernels: what was asked to run quantised weights (see `LoadOptions`), its own and those of what drafts for it.

    Of an encoder-decoder model, context and layers are the decoder's. source_context: the longest source its encoder
    takes, None for a decoder-only model. decoder_prompt: what its decoder begins every text with. speech: of one whose
    encoder reads features of a sound, what these are and what follows from it.

    adapters: names of those that a sequence may have (see `KVCache.adapter`).
    """

    name: str
    architecture: str
    vocab_size: int
    context: int
    layers: tuple[LayerShape, ...]
    hidden_size: int
    num_bytes: int
    dtype: torch.dtype
    device: torch.device
    eos_ids: frozenset[int] = frozenset()
    quantization: str = "none"
    bitwise: bool = False
    implementation: str = "hf"
    kernels: Kernels = "auto"
    source_context: int | None = None
    decoder_prompt: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    # What a model's passes cost is remembered under its repr, and that of all others shall stay what it was.
    speech: Speech | None = field(default=None, repr=False)

    @property
    def encoder_decoder(self) -> bool:
        return self.source_context is not None

    @property
    def reads(self) -> str:
        """What a source of this model is, in words."""
        return "text" if self.speech is None else "features of {} mel bins and {} frames".format(*self.speech.shape)

    def opening(
        self, prompt: Sequence[int], source: Source | Sequence[int] | None = None
    ) -> tuple[Source, tuple[int, ...]]:
        """What a prompt is to this model: the source, for its encoder, and what its decoder's text begins with.

        source: if it is given, the prompt is that beginning. Raises PromptError for a prompt without a source where
        that is a sound, or a beginning that cannot be served.
        """
        if isinstance(source, Features):
            return source, tuple(prompt) if self.speech is None else self.speech.beginning(prompt)
        if source is not None:
            return tuple(source), tuple(prompt)
        if self.speech is not None:
            raise PromptError(
                f"{self.name} reads {self.reads}, not a prompt of text; give LLM.generate {{'input_features': .., "
                "'prompt': ..}, the latter being what its text shall begin with, if that is to be said"
            )
        return (tuple(prompt), self.decoder_prompt) if self.encoder_decoder else ((), tuple(prompt))

    def refusal(self, source: Source) -> str | None:
        """Why its encoder cannot read a source; None if it can. Ids beyond its table are not looked for."""
        if isinstance(source, Features):
            if self.speech is None:
                return f"{self.name} reads text, not features of a sound; give the prompt as text or token ids"
            return self.speech.refusal(source)
        if self.source_context is None:
            return f"{self.name} is a decoder-only model and reads no source" if source else None
        if self.speech is not None:
            return f"{self.name} reads {self.reads}, not text"
        if len(source) == 0:
            return "the prompt is empty: give at least one token"
        if len(source) > self.source_context:
            return (
                f"the prompt has {len(source)} tokens and the encoder of {self.name} takes {self.source_context}; "
                "shorten the prompt"
            )
        return None

    def ruled(self, params: SamplingParams) -> SamplingParams:
        """A request's params with the rules that the model's own settings add to every text; few have any."""
        return params if self.speech is None else self.speech.ruled(params)

    def trial_source(self, tokens: Sequence[int]) -> Source:
        """Something for its encoder to read where it does not matter what: these tokens, as far as it takes them, or
        the like."""
        return tuple(tokens[: self.source_context or 0]) if self.speech is None else self.speech.sample()


@dataclass(slots=True)
class ModelOutput:
    """logits_NV: one row per wanted row of the batch. taps: {layer: [T, hidden]}, the states that leave that layer.
    best: what `likeliest` says of logits_NV, from a model that found it on its way."""

    logits_NV: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    best: Likeliest | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """A model's two ends in float32, for trained heads that share them; of quantised weights, what they stand for.

    embed: ids [T] -> rows of the embedding table [T, hidden], as stored: without a scale that the first layer expects.
    norm: states that leave the last layer [T, hidden] -> what the output matrix gets.
    head_rows: ids [N] -> their rows of the output matrix [N, hidden].
    """

    embed: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    head_rows: Callable[[Tensor], Tensor]


class CausalLM(Protocol):
    """A model that says what comes next. An encoder-decoder one reads the sources that the cache knows of its sequences
    (`KVCache.open`), each once."""

    @property
    def info(self) -> ModelInfo:
        """Facts that do not change."""

    def new_cache(self, num_pages: int, page_size: int = 16) -> KVCache:
        """An empty cache of this model's shape, dtype and device."""

    def forward(
        self, batch: Batch, cache: KVCache, *, taps: Sequence[int] = (), layers: Sequence[int] | None = None
    ) -> ModelOutput:
        """One pass over the batch's rows; their keys and values land in the cache's slots.

        layers: only these run, in ascending order, and only their keys and values are written; states pass the others
        unchanged. None: all. Raises ModelError for one that the model does not have.
        """

    def ends(self) -> Ends:
        """Its embedding, last norm and output matrix. Raises ModelError where they cannot be told apart."""
