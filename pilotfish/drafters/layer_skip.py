"""The target drafts for itself with some of its layers: Draft & Verify (Zhang et al. 2023, arXiv 2309.08168, inner
layers skipped) and LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710, early exit).

No second model, no second cache. It does not know the architecture: the model runs the layers it is asked for. The
one trick: it drafts on the target's own pages. What is committed there was computed by all layers; the rows of the
pending token and of the guesses are scratch behind it, their keys filled in for the layers that ran, and the
verification pass, which feeds these very tokens to all layers, overwrites them in place.

    the target's cache   [ committed: tokens[:-1] | pending, guess 1, guess 2, ... ]   reserved for verification
                                          length ─^   read and written by the layers that draft

Which layers can go is the model's own matter. Of SmolLM2-135M and Qwen2.5-Coder-0.5B, without a fifth of the layers, a
block behind the middle, the likeliest token was still the same in 48 and 65 % of the places; without every other inner
layer in 0 and 21 %; leaving after three quarters in 28 and 29 %, for they were not trained for that. Small models have
few layers to spare: this is for large ones, and for those trained to be left early.

While more than the pending token is missing (a prompt not yet read, a request just resumed) there is nothing to see
the text through, and it waits: reading a prompt twice would cost more than one pass without a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..decoding.draft import EMPTY, Draft
from ..decoding.request import Request
from ..errors import DraftError, OptionError
from ..paged.batch import Feed, lay_out
from .base import Drafter, Setting
from .drawing import Run, extend

if TYPE_CHECKING:
    from ..models.base import CausalLM
    from ..paged.cache import KVCache

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class LayerSkipOptions:
    """One of the two. Raises OptionError for both, and for what is no list of layers."""

    skip_layers: Any = field(
        default=AUTO,
        metadata={"help": "layers left out, counted from 0, such as 3,5,7; auto: a fifth, from the middle on"},
    )
    exit_layer: int | None = field(default=None, metadata={"help": "instead, draft with this many first layers"})

    def __post_init__(self) -> None:
        skipped = self.skipped
        if self.exit_layer is None:
            return
        if skipped is not None:
            raise OptionError("skip_layers and exit_layer exclude each other; give one")
        if isinstance(self.exit_layer, bool) or not isinstance(self.exit_layer, int) or self.exit_layer < 1:
            raise OptionError(f"exit_layer must be a whole number from 1, not {self.exit_layer!r}")

    @property
    def skipped(self) -> frozenset[int] | None:
        """The layers left out; None for auto."""
        value = self.skip_layers
        if value == AUTO:
            return None
        if isinstance(value, str):
            value = [int(part) if part.strip().isdecimal() else part for part in value.split(",")]
        if not isinstance(value, Sequence) or not value:
            raise OptionError(f"skip_layers must be a list of layers or {AUTO!r}, not {value!r}")
        for layer in value:
            if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                raise OptionError(f"skip_layers must name layers by numbers from 0, not {layer!r}")
        return frozenset(value)


class LayerSkipDrafter(Drafter):
    """layers: the target's layers that draft, ascending. num_passes: through them, so far."""

    Options = LayerSkipOptions

    def __init__(self, model: CausalLM, cache: KVCache, layers: Sequence[int]):
        self.model, self.cache, self.layers = model, cache, tuple(layers)
        self.num_passes = 0

    @classmethod
    def build(cls, options: Any, setting: Setting) -> LayerSkipDrafter:
        return cls(setting.model, setting.cache, drafting_layers(options, len(setting.target.layers)))

    def describe(self) -> str:
        return f"{len(self.layers)} of the target's {len(self.model.info.layers)} layers"

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        runs = [self._begin(request, limit) for request, limit in zip(requests, limits, strict=True)]
        active = [run for run in runs if run is not None]
        while active:
            feeds = [self._feed(run) for run in active]
            self.num_passes += 1
            batch = lay_out(feeds, self.cache, self.model.info.device)
            output = self.model.forward(batch, self.cache, layers=self.layers)
            extend(active, [()] * len(active), output.logits_NV, best=output.best)
            active = [run for run in active if not run.done]
        info = self.model.info
        return [EMPTY if run is None else run.draft(info.vocab_size, info.device) for run in runs]

    def _begin(self, request: Request, limit: int) -> Run | None:
        caught_up = request.id in self.cache and self.cache.length(request.id) == len(request.tokens) - 1
        return Run(request, limit) if caught_up else None

    def _feed(self, run: Run) -> Feed:
        past = len(run.request.tokens) + len(run.tokens) - 1
        return Feed(run.request.id, (run.request.tokens + run.tokens)[-1:], past, 1)


def drafting_layers(options: LayerSkipOptions, num_layers: int) -> tuple[int, ...]:
    """The layers that run, of ``num_layers``. Raises DraftError for layers that the target lacks, and if none or all
    would be left."""
    if options.exit_layer is not None:
        if options.exit_layer >= num_layers:
            raise DraftError(
                f"exit_layer {options.exit_layer} leaves nothing out: the target has {num_layers} layers; "
                f"give 1 to {num_layers - 1}"
            )
        return tuple(range(options.exit_layer))
    if num_layers < 2:
        raise DraftError("the target has a single layer, so there is none to leave out")
    skipped = options.skipped
    if skipped is None:
        skipped = frozenset(range(num_layers // 2, num_layers // 2 + max(1, num_layers // 5)))
    for layer in sorted(skipped):
        if layer >= num_layers:
            raise DraftError(f"skip_layers names layer {layer}; the target has layers 0 to {num_layers - 1}")
    layers = tuple(layer for layer in range(num_layers) if layer not in skipped)
    if not layers:
        raise DraftError(f"skip_layers names all {num_layers} layers; leave at least one to draft with")
    return layers
