"""A draft model that is sped up by a drafter of its own: staged speculation (Spector and Re 2023, arXiv 2308.04623).

It drafts, token for token, what `draft_model` drafts, in fewer passes of the draft model. It does not know what its
inner drafter is: n-grams, suffixes, a smaller model, one that is itself staged. The one trick: a draft model's own
choices are fixed by its laws and the request's coins (the argmax, the shared race, or the draw that is the request's
at this place), so checking a guess is comparing it, nothing has to be accepted or resampled, and the laws that go
with drawn tokens are at hand.

    one pass of the draft model    rows     last token   guess 1   guess 2   guess 3
                                   chooses  = guess 1    = guess 2  other     (not looked at)

Of a tree from the inner drafter the path of first children is fed: rows of a side branch would lie in the wrong
places of the draft model's cache. The inner drafter is shown how far the draft has come as a request whose last
tokens are guessed (`Request.num_guessed`); it is never told what the target kept, but sees it in the next text.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..decoding.draft import EMPTY, MAX_NODES, Draft
from ..decoding.request import Request
from ..errors import DraftError
from ..models.tokenizer import mismatch
from . import registry
from .base import Drafter, Setting
from .draft_model import DraftModelDrafter, DraftModelOptions, load_draft
from .drawing import Run

if TYPE_CHECKING:
    from ..models.base import CausalLM

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedOptions(DraftModelOptions):
    """As for `draft_model`, and the drafter inside. Raises OptionError for values out of range and unknown methods."""

    inner: Any = field(
        default="ngram",
        metadata={"help": "what drafts for the draft model: a method, or its config as JSON", "flag": "inner_drafter"},
    )

    def __post_init__(self) -> None:
        DraftModelOptions.__post_init__(self)
        registry.member(self.inner, "inner")


class StagedDrafter(DraftModelDrafter):
    """build_inner: makes the inner drafter, given where it will work: the draft model takes the target's place there.
    inner_limit: most guesses in one pass of the draft model."""

    Options = StagedOptions

    def __init__(
        self,
        model: CausalLM,
        build_inner: Callable[[Setting], Drafter],
        setting: Setting,
        options: StagedOptions | None = None,
        *,
        inner_limit: int = MAX_NODES,
    ):
        super().__init__(model, setting, options)
        inside = replace(
            setting,
            target=model.info,
            model=model,
            cache=self.cache,
            num_cache_tokens=self.cache.capacity,
            device=model.info.device,
            trees=False,
        )
        self.inner, self.inner_limit = build_inner(inside), inner_limit
        if self.inner.taps:
            raise DraftError("the inner drafter of 'staged' wants hidden states, and a draft model hands out none")

    @classmethod
    def build(cls, options: Any, setting: Setting) -> StagedDrafter:
        inner = registry.member(options.inner, "inner")
        limit = int(inner.common.num_speculative_tokens)
        loaded = load_draft(options, setting, "staged")
        if loaded.tokenizer is not None:
            assert setting.tokenizer is not None
            odd = mismatch(loaded.tokenizer, setting.tokenizer)
            raise DraftError(
                f"draft model {loaded.model.info.name} has another vocabulary than {setting.target.name} ({odd}), and "
                "the inner drafter of 'staged' guesses in the target's; use method 'draft_model', or a draft of the "
                "same family"
            )
        return cls(loaded.model, inner.build, setting, options, inner_limit=limit)

    def describe(self) -> str:
        return f"{super().describe()}, sped up by {registry.method_of(self.inner)}"

    def release(self, request: Request) -> None:
        super().release(request)
        self.inner.release(request)

    def guess(self, runs: Sequence[Run]) -> list[Sequence[int]]:
        wanted = [run for run in runs if run.num_left > 1]
        limits = [min(run.num_left - 1, self.inner_limit) for run in wanted]
        drafts = self._ask_inner(wanted, limits) if wanted else []
        paths = {
            id(run): self._readable(_first_path(draft)[:limit])
            for run, draft, limit in zip(wanted, drafts, limits, strict=True)
        }
        return [paths.get(id(run), ()) for run in runs]

    def _ask_inner(self, wanted: Sequence[Run], limits: Sequence[int]) -> Sequence[Draft]:
        """What the inner drafter proposes. It may not fail here: tokens were drawn already, and to drop them because of
        how the text goes on would bias it."""
        try:
            drafts = self.inner.propose([_shadow(run) for run in wanted], limits)
            if len(drafts) == len(wanted):
                return drafts
            log.error("the inner drafter gave %d drafts for %d requests; none is used", len(drafts), len(wanted))
        except Exception:
            log.exception("the inner drafter failed; the draft model goes on alone")
        return [EMPTY] * len(wanted)

    def _readable(self, guess: Sequence[int]) -> Sequence[int]:
        """Up to the first id that the draft model's table lacks: what it cannot read it cannot choose either."""
        num_ids = self.model.info.vocab_size
        return tuple(itertools.takewhile(lambda token: 0 <= token < num_ids, guess))


def _shadow(run: Run) -> Request:
    """The request as it would be if what was drafted so far stood."""
    shadow = copy.copy(run.request)
    shadow.tokens = run.request.tokens + run.tokens
    shadow.num_guessed = run.request.num_guessed + len(run.tokens)
    return shadow


def _first_path(draft: Draft) -> list[int]:
    """Tokens along the first children: the whole of a chain, and a tree's likeliest path."""
    path: list[int] = []
    node = -1
    for child, parent in enumerate(draft.parents):
        if parent == node:
            path.append(draft.tokens[child])
            node = child
    return path
