"""Clock: how an engine's step divides into drafting, the target's pass, and the engine itself.

It does not know statistics or prompts. The one trick: it hangs itself around one engine's target and drafter from
outside, so the engine contains no timers and a bench measures the very code that serves.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from ..decoding.draft import EMPTY, Draft, ancestors
from ..decoding.request import Request
from ..engine.engine import Engine, Event
from ..models.base import CausalLM, ModelOutput
from ..paged.batch import Batch
from ..paged.cache import KVCache

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request in one step. drafted: positions that were guessed *and* judged; accepted: how many of them stood."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step that only decoded: every row of its pass was a pending token or a draft's.

    seconds: the whole step; draft and pass seconds are parts of it. num_rows: of the pass.
    """

    seconds: float
    draft_seconds: float
    pass_seconds: float
    num_rows: int
    outcomes: tuple[Outcome, ...]


class Clock:
    """Times one engine's steps. While it is attached, call `step` instead of the engine's."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._wait = _waiter(engine.target.info.device)
        self._draft_seconds = self._pass_seconds = 0.0
        self._num_rows, self._only_decoding = 0, False
        self._proposed: dict[str, Draft] = {}
        engine.target = _TimedTarget(engine.target, self)
        # Their own methods are replaced, so whatever else they are or have stays visible.
        arms: list[Any] = [arm for arm, _ in engine.drafter.arms]
        for arm in arms:
            arm.propose = self._drafting(self._noting(arm.propose))
        drafter: Any = engine.drafter
        drafter.observe = self._drafting(drafter.observe)

    def step(self) -> tuple[list[Event], TimedStep | None]:
        """The engine's step and its times; no times for one that read (part of) a prompt."""
        self._draft_seconds = self._pass_seconds = 0.0
        self._proposed.clear()
        start = time.perf_counter()
        events = self.engine.step()
        seconds = time.perf_counter() - start
        if not events or not self._only_decoding:
            return events, None
        outcomes = tuple(_outcome(event, self._proposed.get(event.request.id, EMPTY)) for event in events)
        return events, TimedStep(seconds, self._draft_seconds, self._pass_seconds, self._num_rows, outcomes)

    def time_pass(self, run: Callable[[], ModelOutput], batch: Batch) -> ModelOutput:
        """Run and record one pass of the target."""
        start = time.perf_counter()
        output = run()
        self._wait()
        self._pass_seconds += time.perf_counter() - start
        self._num_rows = batch.num_rows
        self._only_decoding = all(span.feed.num_wanted == len(span.feed.tokens) for span in batch.spans)
        return output

    def _drafting(self, method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._wait()
                self._draft_seconds += time.perf_counter() - start

        return timed

    def _noting(
        self, propose: Callable[[Sequence[Request], Sequence[int]], list[Draft]]
    ) -> Callable[[Sequence[Request], Sequence[int]], list[Draft]]:
        def noting(requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
            drafts = propose(requests, limits)
            self._proposed.update((request.id, draft) for request, draft in zip(requests, drafts, strict=False))
            return drafts

        return noting


class _TimedTarget:
    """The target as the engine sees it while a clock is attached."""

    def __init__(self, model: CausalLM, clock: Clock):
        self.model, self.info, self._clock = model, model.info, clock
        self.new_cache, self.ends = model.new_cache, model.ends

    def forward(self, batch: Batch, cache: KVCache, **options: Any) -> ModelOutput:
        return self._clock.time_pass(lambda: self.model.forward(batch, cache, **options), batch)


def depth_of(draft: Draft) -> int:
    """Positions that a draft guesses: its nodes if it is a chain, the longest path's if it is a tree."""
    if draft.is_chain:
        return len(draft)
    return max(seen.bit_count() for seen in ancestors(draft.parents))


def _outcome(event: Event, proposed: Draft) -> Outcome:
    depth = depth_of(proposed.first(event.num_drafted))  # the engine may have taken fewer than were proposed, or none
    # Where the text ended inside the accepted run, nobody judged what came after.
    ended_inside = event.finish is not None and event.num_accepted == len(event.tokens)
    return Outcome(event.num_accepted if ended_inside else depth, event.num_accepted)


def _waiter(device: torch.device) -> Callable[[], None]:
    """What to call before reading the time: work on a GPU is only queued when a call returns."""
    if device.type == "cuda":
        return functools.partial(torch.cuda.synchronize, device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
