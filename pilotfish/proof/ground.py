"""Ground: what all checks stand on (target, method, prompts), and how an engine is driven while its pages are watched.

It does not know what is being proved. The one trick: every run of the proof, whatever it is for, goes through
`drive`, so page integrity is looked at after every single step of all of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..decoding.noise import fold
from ..decoding.paths import split
from ..decoding.request import Request
from ..decoding.sampling import SamplingParams
from ..decoding.verify import Rule
from ..drafters.base import Drafter, Setting
from ..drafters.none import NoDrafter
from ..engine.engine import Engine, Event
from ..engine.options import EngineOptions
from ..models.base import CausalLM
from ..models.tokenizer import Tokenizer
from ..paged.cache import KVCache
from .actors import Witness
from .options import VerifyOptions

Build = Callable[[Setting], Drafter]
TYPICAL_DRAFT = 5  # nodes, where a controller decides


class Meter:
    """One progress bar on stderr over all stages; into a file or a pipe, one line a stage.

    Work is counted in expected seconds, so the time left is honest.
    """

    def __init__(self, console: Console | None = None):
        console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            speed_estimate_period=3600.0,  # stages differ: the speed is judged by all of them
        )
        self._console, self._lines = console, not console.is_terminal
        self._task = self._bar.add_task("starting", total=None)
        self._done, self._stage_end, self._tick = 0.0, 0.0, 0.0

    @property
    def fraction(self) -> float:
        """How much of the planned work is done, 0 to 1."""
        task = self._bar.tasks[self._task]
        return task.completed / task.total if task.total else 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._bar:
            yield

    def plan(self, seconds: float) -> None:
        """How much work there will be in all."""
        if self._lines:
            self._console.print(f"verify: about {seconds:.0f} s in all", highlight=False)
        self._bar.update(self._task, total=seconds)

    @contextmanager
    def stage(self, name: str, seconds: float, num_ticks: int) -> Iterator[None]:
        """A part of the work; ``tick`` counts its steps, and at its end it is done whatever was counted."""
        self._bar.update(self._task, description=name)
        if self._lines:
            self._console.print(f"verify: {name} (about {seconds:.0f} s)", highlight=False, soft_wrap=True)
        self._stage_end, self._tick = self._done + seconds, seconds / max(1, num_ticks)
        yield
        self._done = self._stage_end
        self._bar.update(self._task, completed=self._done)

    def tick(self, num: int = 1) -> None:
        self._done = min(self._stage_end, self._done + num * self._tick)
        self._bar.update(self._task, completed=self._done)


@dataclass(slots=True)
class Watch:
    """Looks at the pages after every step. faults: what did not add up, in words."""

    num_looks: int = 0
    num_failed_drafts: int = 0
    faults: list[str] = field(default_factory=list)

    def look(self, engine: Engine) -> None:
        self.num_looks += 1
        try:
            engine.scheduler.check()
        except AssertionError as error:
            self.faults.append(str(error) or "an integrity check failed")

    def end(self, engine: Engine) -> None:
        """After a run: nothing is left, neither in the engine nor in a cache of the drafter's own."""
        self.look(engine)
        self.num_failed_drafts += engine.num_failed_drafts
        drafter = engine.drafter
        while isinstance(drafter, Witness):
            drafter = drafter.drafter
        own = getattr(drafter, "cache", None)
        caches = [(engine.cache, "the engine"), *([(own, "the drafter")] if isinstance(own, KVCache) else [])]
        for cache, owner in caches:
            if cache.pool.num_held or cache.sequences:
                self.faults.append(f"{owner} still holds {cache.pool.num_held} pages after its last request")


@dataclass(slots=True)
class Ground:
    """build, rule, num_drafted: the method under test. prompts: as paths (`decoding.paths`). pass_seconds: of a one-row
    pass."""

    model: CausalLM
    tokenizer: Tokenizer | None
    build: Build
    rule: Rule
    num_drafted: int | Literal["auto"]
    prompts: list[list[int]]
    options: VerifyOptions
    meter: Meter
    watch: Watch = field(default_factory=Watch)
    pass_seconds: float = 0.05

    @property
    def num_beside(self) -> int:
        """Rows of a verification pass beside any one of them, about."""
        return self.num_seats * (1 + (TYPICAL_DRAFT if self.num_drafted == "auto" else self.num_drafted)) - 1

    @property
    def num_seats(self) -> int:
        """Prompts that run at once."""
        return min(len(self.prompts), self.options.concurrency)

    def engine(
        self,
        build: Build | None = None,
        *,
        num_drafted: int | None = None,
        rule: Rule | None = None,
        num_seats: int | None = None,
    ) -> Engine:
        """An engine with seats for as many prompts as shall run at once: the method under test, or another drafter."""
        info = self.model.info
        longest = max(map(len, self.prompts)) + self.options.max_tokens + 1
        return Engine(
            self.model,
            build or self.build,
            EngineOptions(max_num_seqs=num_seats or self.num_seats, max_model_len=min(info.context, longest)),
            tokenizer=self.tokenizer,
            rule=rule or self.rule,
            num_speculative_tokens=self.num_drafted if num_drafted is None else num_drafted,
            entropy=seed_stream(self.options.seed, 1),
        )

    def setting(self) -> Setting:
        """Where the drafters of these engines work."""
        found: list[Setting] = []

        def note(setting: Setting) -> Drafter:
            found.append(setting)
            return NoDrafter()

        self.engine(note, num_drafted=0)
        return found[0]

    def plain_engine(self) -> Engine:
        return self.engine(lambda _setting: NoDrafter(), num_drafted=0, rule="rejection")

    def params(self, prompt: int, temperature: float, max_tokens: int | None = None) -> SamplingParams:
        """Sampled texts are seeded, a seed per prompt."""
        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens or self.options.max_tokens,
            seed=fold(self.options.seed, 1 + prompt) if temperature else None,
        )


def seed_stream(seed: int, purpose: int) -> Callable[[], int]:
    """Seeds for the requests of one run: as good as the system's entropy, and the same every time."""
    state = [0]

    def draw() -> int:
        state[0] += 1
        return fold(fold(seed, -purpose & 0xFFFF_FFFF), state[0])

    return draw


def drive(engine: Engine, watch: Watch, on_event: Callable[[Event], None] = lambda _event: None) -> None:
    """Step until nothing is left, looking at the pages after each step."""
    while engine.has_work:
        for event in engine.step():
            on_event(event)
        watch.look(engine)
    watch.end(engine)


def queue(engine: Engine, path: Sequence[int], params: SamplingParams) -> list[Request]:
    """`Engine.add` for a path."""
    source, tokens = split(path)
    return engine.add(tokens, params, source=source)


def measure_pass(ground: Ground) -> float:
    """Seconds of a one-row pass, roughly: three plain tokens after the first prompt, which also warm up."""
    engine = ground.plain_engine()
    queue(engine, ground.prompts[0], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    start = time.perf_counter()
    drive(engine, ground.watch)
    return (time.perf_counter() - start) / 3
