"""Where each millisecond of a step goes, beside the floor that memory sets: weights read once a pass.

It does not know speed-ups (`measure` does). The one trick: the stages are the nouns of `Engine.step`, so they can be
timed from outside, by wrapping them on one engine, and what no stage explains is the loop itself.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.table import Table

from ..decoding.sampling import SamplingParams
from ..drafters.registry import Speculation, parse
from ..engine.engine import Engine
from ..engine.judge import judge
from ..engine.options import EngineOptions
from ..models.load import Loaded
from ..models.tokenizer import Detokenizer
from ..paged.batch import lay_out
from .options import BenchOptions
from .prompts import read_prompts
from .report import new_console

STAGES = ("plan", "draft", "lay out", "target pass", "judge", "commit", "observe", "detokenise")
_PROMPTS, _STEPS_SKIPPED = 4, 2
_BANDWIDTH_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds a step of one method, by stage, over its steps after the prompt. tokens: emitted a step."""

    method: str
    milliseconds: Mapping[str, float]
    total: float
    tokens: float
    num_steps: int

    @property
    def rest(self) -> float:
        """What no stage explains: the loop and the bookkeeping between."""
        return self.total - sum(self.milliseconds.values())


class _Stopwatch:
    """Adds up seconds by stage, each second to the innermost one; but a drafter's passes are drafting."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if "draft" in self._open:
                return function(*args, **kwargs)
            self._book()
            self._open.append(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._open.pop()

        return run

    def _book(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def run_profile(
    options: BenchOptions, target: Loaded, speculations: Sequence[Speculation], engine: EngineOptions
) -> list[Profile]:
    """Plain decoding and each method on a few prompts, one at a time, stage by stage."""
    prompts = [prompt.ids(target.tokenizer) for prompt in read_prompts(options.prompts, _PROMPTS)]
    params = SamplingParams(
        temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens, ignore_eos=options.ignore_eos
    )
    return [_profile(one, target, prompts, params, engine) for one in (parse(None), *speculations)]


def _profile(
    speculation: Speculation,
    target: Loaded,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    options: EngineOptions,
) -> Profile:
    engine = Engine(
        target.model,
        speculation.build,
        options,
        tokenizer=target.tokenizer,
        rule=speculation.common.rule,
        num_speculative_tokens=0 if speculation.method == "none" else speculation.common.num_speculative_tokens,
    )
    text_stream = None if target.tokenizer is None else functools.partial(Detokenizer, target.tokenizer)
    sums, num_steps, num_tokens, total = dict.fromkeys(STAGES, 0.0), 0, 0, 0.0
    for prompt in prompts:
        (request,) = engine.add(prompt, params, text_stream=text_stream)
        for _ in range(_STEPS_SKIPPED):  # the prompt, and whatever is done once
            engine.step()
        before, watch = request.num_output, _Stopwatch()
        with _watched(engine, watch):
            started = time.perf_counter()
            while not request.finish:
                engine.step()
                num_steps += 1
            total += time.perf_counter() - started
        num_tokens += request.num_output - before
        sums = {stage: sums[stage] + watch.seconds[stage] for stage in STAGES}
    count = max(1, num_steps)
    milliseconds = {stage: 1e3 * seconds / count for stage, seconds in sums.items()}
    return Profile(speculation.method, milliseconds, 1e3 * total / count, num_tokens / count, num_steps)


@contextmanager
def _watched(engine: Engine, watch: _Stopwatch) -> Iterator[None]:
    """Wrap the stages of one engine for a while."""
    patches = [
        mock.patch.object(engine.scheduler, "plan", watch.timed("plan", engine.scheduler.plan)),
        mock.patch.object(engine.drafter, "propose", watch.timed("draft", engine.drafter.propose)),
        mock.patch.object(engine.drafter, "observe", watch.timed("observe", engine.drafter.observe)),
        mock.patch.object(engine, "_advance", watch.timed("commit", engine._advance)),
        mock.patch.object(engine.cache, "commit", watch.timed("commit", engine.cache.commit)),
        mock.patch.object(engine.target, "forward", watch.timed("target pass", engine.target.forward)),
        mock.patch("pilotfish.engine.engine.lay_out", watch.timed("lay out", lay_out)),
        mock.patch("pilotfish.engine.engine.judge", watch.timed("judge", judge)),
        mock.patch.object(Detokenizer, "feed", watch.timed("detokenise", Detokenizer.feed)),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def bandwidth() -> float:
    """Bytes a second that this machine reads from memory with torch's threads, the best of a few sums over 256 MiB."""
    data = torch.ones(_BANDWIDTH_BYTES // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return _BANDWIDTH_BYTES / best


def print_profile(profiles: Sequence[Profile], target: Loaded) -> None:
    """A table for people: a column per method, a row per stage, the floor below."""
    table = Table(title="milliseconds a step, by stage")
    table.add_column("stage")
    for profile in profiles:
        table.add_column("plain" if profile.method == "none" else profile.method, justify="right")
    for stage in STAGES:
        table.add_row(stage, *(f"{profile.milliseconds[stage]:.3f}" for profile in profiles))
    table.add_row("the loop itself", *(f"{profile.rest:.3f}" for profile in profiles))
    table.add_row("whole step", *(f"{profile.total:.3f}" for profile in profiles), style="bold")
    table.add_row("tokens a step", *(f"{profile.tokens:.2f}" for profile in profiles))
    table.add_row("milliseconds a token", *(f"{profile.total / profile.tokens:.3f}" for profile in profiles))
    screen = new_console()
    screen.print(table)
    if target.model.info.device.type == "cpu":
        speed = bandwidth()
        size = target.model.info.num_bytes
        screen.print(
            f"floor of a pass: {size / 2**20:.0f} MiB of weights at {speed / 1e9:.1f} GB/s (measured now): "
            f"{1e3 * size / speed:.1f} ms",
            highlight=False,
        )
