"""Collecting: the target answers prompts in large batches, and every answer goes into the store when it is finished.

It does not know what will be learnt from the texts. The one trick: a recipe's questions and the answers are requests of
one engine alike, so the batch is always full; and the plan is numbered, so a later start goes on behind the last number
that is in the store.

Half of the answers are greedy and half are drawn at temperature 1: heads are used for both. A greedy answer that goes
in circles, as small models' do, is cut there: more of the same teaches nothing.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bench.prompts import BenchPrompt, read_line  # one format of files for both
from ..decoding.request import Request
from ..decoding.sampling import SamplingParams
from ..drafters.none import NoDrafter
from ..engine.engine import Engine
from ..engine.options import EngineOptions
from ..errors import OptionError, PromptError
from ..models.load import Loaded
from ..models.tokenizer import Tokenizer
from .options import TrainOptions
from .prompts import Ask, Material, Prompt, Prompts, Recipe, read_seeds
from .store import Text, TextStore

_ROWS = 1024  # of a pass: prompts go in chunks, and answers do not wait long for them
_CHECK_EVERY, _CIRCLE, _LONGEST_PERIOD = 16, 64, 24
_STALLED = 400  # so many answers that were all known already: there is nothing more to get

Say = Callable[[str], None]


@dataclass(slots=True)
class _Job:
    """A prompt on its way. prompt: None while the recipe is still asking."""

    number: int
    recipe: Recipe
    temperature: float
    prompt: Prompt | None = None


@dataclass(slots=True)
class Collected:
    """What a run of `collect` did."""

    num_texts: int = 0
    num_tokens: int = 0
    num_written: int = 0  # tokens of prompts that the target wrote
    skipped_lines: list[int] = field(default_factory=list)


def collect(
    options: TrainOptions,
    target: Loaded,
    store: TextStore,
    *,
    say: Say = lambda _line: None,
    watch: Callable[[Collected], None] = lambda _done: None,
) -> Collected:
    """Fill the store up to ``options.num_tokens`` answer tokens.

    watch: called after every pass. Raises PilotfishError if the disk is full (what was stored stays), OptionError for
    files that cannot be used.
    """
    done = Collected()
    source = _source(options, target, store, done, say)
    collector = _Collector(options, target, store, source, done)
    while store.num_tokens < options.num_tokens and not collector.stalled:
        collector.step()
        watch(done)
    if collector.stalled:
        say(f"the prompts give no new texts any more: {store.num_tokens} tokens are what there is")
    store.sync(force=True)
    return done


# -- where prompts come from -----------------------------------------------------------------------------------------


class _Source:
    """Numbered jobs. material: what recipes draw from; answers are added to it."""

    material = Material()

    def job(self, number: int) -> _Job:
        raise NotImplementedError


class _Written(_Source):
    """Prompts that the target writes."""

    def __init__(self, prompts: Prompts):
        self.prompts, self.material = prompts, prompts.material

    def job(self, number: int) -> _Job:
        recipe, rng = self.prompts.recipe(number)
        return _Job(number, recipe, float(rng.random() < 0.5))


class _Given(_Source):
    """The prompts of a file, in turns: from the second time on at temperature 1, for greedy answers would repeat."""

    def __init__(self, prompts: Sequence[BenchPrompt], tokenizer: Tokenizer | None, max_length: int):
        self.prompts, self.tokenizer, self.max_length = prompts, tokenizer, max_length
        self.material = Material()

    def job(self, number: int) -> _Job:
        turn, index = divmod(number, len(self.prompts))
        return _Job(number, self._recipe(self.prompts[index]), float(turn > 0 or index % 2))

    def _recipe(self, given: BenchPrompt) -> Recipe:
        yield from ()
        ids = given.ids(self.tokenizer)
        if not 0 < len(ids) <= self.max_length - 16:
            return None
        return Prompt(ids, given.category, self.max_length - len(ids))


def _source(options: TrainOptions, target: Loaded, store: TextStore, done: Collected, say: Say) -> _Source:
    length = _length(options, target)
    if options.prompts is not None:
        given = read_given(options.prompts, done, say)
        return _Given(given, target.tokenizer, length)
    material = Material()
    if options.seed_text is not None:
        material.seeds, skipped = read_seeds(options.seed_text)
        counts = ", ".join(f"{len(texts)} {name}" for name, texts in sorted(material.seeds.items()))
        say(f"{options.seed_text}: paragraphs: {counts}" + (f"; {skipped} files are not text" if skipped else ""))
    if target.tokenizer is not None:
        for text in store.texts:
            if text.kind == "passage":
                material.keep(text.kind, "", target.tokenizer.decode(text.ids[text.num_prompt :]))
    vocabulary = target.model.info.vocab_size
    return _Written(Prompts(target.tokenizer, vocabulary, length, options.seed, material))


def read_given(path: str, done: Collected, say: Say) -> list[BenchPrompt]:
    """A JSONL file of prompts. Broken lines are skipped, counted and named. Raises OptionError if no line is usable."""
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise OptionError(f"prompts cannot be read from {path}: {error.strerror}") from error
    given = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given.append(read_line(line, f"line {number}"))
        except PromptError as error:
            done.skipped_lines.append(number)
            say(f"{path}, {error}; skipped")
    if not given:
        raise OptionError(f"{path} has no usable prompts: it must have a JSON object on each line")
    if done.skipped_lines:
        say(f"{path}: {len(done.skipped_lines)} of {len(lines)} lines skipped")
    return given


def _length(options: TrainOptions, target: Loaded) -> int:
    return min(options.max_length, target.model.info.context)


# -- the loop --------------------------------------------------------------------------------------------------------


class _Collector:
    def __init__(self, options: TrainOptions, target: Loaded, store: TextStore, source: _Source, done: Collected):
        self.store, self.source, self.done = store, source, done
        self.tokenizer, self.batch = target.tokenizer, options.collect_batch
        self.number = store.next_number
        length = _length(options, target)
        pages = -(-length // 16) + 1
        self.engine = Engine(
            target.model,
            lambda _setting: NoDrafter(),
            EngineOptions(
                max_num_seqs=self.batch,
                max_num_batched_tokens=max(_ROWS, self.batch),
                max_model_len=length,
                num_pages=max(pages, self.batch * pages * 2 // 3),  # few are long at once; the scheduler copes
            ),
            tokenizer=target.tokenizer,
            num_speculative_tokens=0,
            entropy=_entropy(options.seed, self.number),
        )
        self.jobs: dict[str, tuple[_Job, Request]] = {}
        self.num_idle = 0

    @property
    def stalled(self) -> bool:
        return self.num_idle >= _STALLED

    def step(self) -> None:
        """Fill the batch, run one pass, take what is finished."""
        while len(self.jobs) < self.batch and not self.stalled:
            job = self.source.job(self.number)
            self.number += 1
            self._go_on(job, None)
        for event in self.engine.step():
            request = event.request
            if event.finish is None and event.tokens and self._in_circles(request):
                self.engine.abort(request)
            if request.finish is not None:
                self._finished(request)

    def _go_on(self, job: _Job, wrote: str | None) -> None:
        """Let the recipe go on with what the target wrote, until it asks again or is done."""
        try:
            ask = next(job.recipe) if wrote is None else job.recipe.send(wrote)
        except StopIteration as end:
            job.prompt = end.value
            if job.prompt is None:
                self.num_idle += 1
            else:
                self._add(job, job.prompt.ids, job.prompt.num_tokens, job.temperature)
            return
        assert isinstance(ask, Ask)
        if len(ask.ids) + ask.num_tokens > self.engine.max_length:
            job.recipe.close()  # too long to be gone on with
            self.num_idle += 1
            return
        self._add(job, ask.ids, ask.num_tokens, ask.temperature)

    def _add(self, job: _Job, ids: Sequence[int], num_tokens: int, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=num_tokens)
        (request,) = self.engine.add(ids, params)
        self.jobs[request.id] = (job, request)

    def _finished(self, request: Request) -> None:
        job, _ = self.jobs.pop(request.id)
        if request.error:  # NaN from the model: nothing to learn from
            self.num_idle += 1
            return
        if job.prompt is None:
            assert self.tokenizer is not None
            self.done.num_written += request.num_output
            self._go_on(job, self.tokenizer.decode(request.output))
            return
        text = Text(
            ids=tuple(request.tokens),
            num_prompt=request.num_prompt,
            kind=job.prompt.kind,
            number=job.number,
            temperature=job.temperature,
            ended=request.finish == "stop",
        )
        if request.num_output < 4 or not self.store.append(text):
            self.num_idle += 1
            return
        self.num_idle = 0
        self.done.num_texts += 1
        self.done.num_tokens += text.num_answer
        if self.tokenizer is not None:
            self.source.material.keep(job.prompt.kind, job.prompt.message, self.tokenizer.decode(request.output))

    def _in_circles(self, request: Request) -> bool:
        if not request.params.greedy or request.num_output % _CHECK_EVERY or request.num_output < _CIRCLE:
            return False
        last = request.tokens[-_CIRCLE:]
        return any(last[period:] == last[:-period] for period in range(1, _LONGEST_PERIOD))


def _entropy(seed: int, number: int) -> Callable[[], int]:
    rng: Any = random.Random(f"{seed}/{number}/draws")
    return lambda: rng.getrandbits(63)
