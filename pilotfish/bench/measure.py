"""`pilotfish bench`: plain decoding and each method on the same target, in turns.

It does not know tables or files of results. The one trick: everything is a `Run` of one batch of prompts; for each
prompt all methods run one after another, in an order that rotates, so slow and fast moments of the machine fall on
all of them alike.

The target is loaded once, and so is a draft model. Each repeat starts with fresh engines and drafters: nothing that
was learnt or cached from the same prompts in an earlier repeat can help. Prefixes are not shared.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..decoding.paths import join
from ..decoding.request import Request
from ..decoding.sampling import SamplingParams
from ..drafters.draft_model import DraftModelOptions, load_named
from ..drafters.registry import Speculation, parse
from ..engine.options import EngineOptions
from ..errors import PilotfishError, PromptError
from ..llm import LLM
from ..models.load import Loaded
from ..models.tokenizer import Detokenizer
from ..trace import Json, TraceFile, listen
from .clock import Clock, TimedStep
from .divergence import first_difference, margin
from .environment import describe
from .options import BenchOptions
from .plot import check, draw
from .progress import Progress
from .prompts import BenchPrompt, read_prompts
from .results import Divergence, Report, Run, Variant, rows_of, speedups_of

_WARMUP_ROWS, _WARMUP_TOKENS = 16, 4


@dataclass(frozen=True, slots=True)
class _Unit:
    """Prompts that run as one batch, by index; all of one category."""

    index: int
    category: str
    prompts: tuple[int, ...]


@dataclass(slots=True)
class _Work:
    """What is measured, and what has been measured so far."""

    target: Loaded
    options: BenchOptions
    engine: EngineOptions
    prompts: list[BenchPrompt]
    ids: list[list[int]]
    variants: list[Variant]
    configs: list[Mapping[str, Any]]
    params: SamplingParams
    runs: list[Run] = field(default_factory=list)


def run_bench(
    options: BenchOptions,
    target: Loaded,
    speculations: Sequence[Speculation | Mapping[str, Any]],
    *,
    engine: EngineOptions | None = None,
) -> Report:
    """Measure plain decoding and these methods; Ctrl-C ends early, with what there is.

    engine: bounds of the engines; seats, lengths and prefix sharing are set here. Raises PromptError and OptionError
    before anything runs, DraftError for a method that does not fit the target.
    """
    if options.plot is not None:
        check(options.plot)
    with TraceFile(options.trace) if options.trace is not None else nullcontext() as trace:
        work = _prepare(options, target, speculations, engine or EngineOptions())
        report = _report(work)
        if trace is not None and not report.environment["interrupted"]:
            try:
                _trace(work, trace)
            except KeyboardInterrupt:  # what was measured stands
                report.environment["interrupted"] = True
    if options.plot is not None and report.rows:
        draw(report, options.plot)
    return report


def _report(work: _Work) -> Report:
    options = work.options
    interrupted = False
    with Progress(options.repeats * len(_units(work)) * len(work.variants)) as progress:
        try:
            _measure(work, progress)
        except KeyboardInterrupt:
            interrupted = True
    agreement = _agreement(work) if options.comparable else {}
    categories = [prompt.category for prompt in work.prompts]
    return Report(
        rows_of(work.runs, work.variants, options.temperature, agreement, categories),
        describe(work.target.model.info, options, num_prompts=len(work.prompts), interrupted=interrupted),
        speedups_of(work.runs, work.variants),
    )


def _prepare(
    options: BenchOptions,
    target: Loaded,
    speculations: Sequence[Speculation | Mapping[str, Any]],
    engine: EngineOptions,
) -> _Work:
    prompts = read_prompts(options.prompts, options.limit)
    ids = [prompt.ids(target.tokenizer) for prompt in prompts]
    context = min(engine.max_model_len or target.model.info.context, target.model.info.context)
    beginnings = [target.model.info.opening(own)[1] for own in ids]
    for prompt, own in zip(prompts, beginnings, strict=True):
        if len(own) + options.max_tokens > context:
            raise PromptError(
                f"{prompt.name} has {len(own)} tokens, which with max_tokens {options.max_tokens} is more than the "
                f"context of {context}; leave it out, shorten it, or lower max_tokens"
            )
    bounded = replace(
        engine,
        max_num_seqs=options.concurrency,
        max_num_batched_tokens=max(engine.max_num_batched_tokens, options.concurrency),
        max_model_len=max(map(len, beginnings)) + options.max_tokens,
        enable_prefix_caching=False,
    )
    variants, configs = _variants(options, target, speculations, bounded)
    params = SamplingParams(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed if options.temperature > 0 else None,
        ignore_eos=options.ignore_eos,
    )
    return _Work(target, options, bounded, prompts, ids, variants, configs, params)


def _variants(
    options: BenchOptions,
    target: Loaded,
    speculations: Sequence[Speculation | Mapping[str, Any]],
    engine: EngineOptions,
) -> tuple[list[Variant], list[Mapping[str, Any]]]:
    """Plain decoding, then every method at every K. Each is built once, so that a misfit fails now."""
    variants = [Variant(0, "none", 0)]
    configs: list[Mapping[str, Any]] = [{}]
    for given in speculations:
        speculation = given if isinstance(given, Speculation) else parse(given)
        if speculation.method == "none":  # is measured anyway
            continue
        config = _config(_loaded_once(speculation, target))
        about = LLM.from_model(target, speculative_config=config, **asdict(engine)).engine.drafter.describe()
        for num_drafted in options.num_drafted or (speculation.common.num_speculative_tokens,):
            variants.append(Variant(len(variants), speculation.method, num_drafted, about))
            configs.append({**config, "num_speculative_tokens": num_drafted})
    return variants, configs


def _loaded_once(speculation: Speculation, target: Loaded) -> Speculation:
    """The same with a draft model's name replaced by the model, for it is built into many engines.

    A model that is named deeper, by a drafter inside a drafter, is loaded for each engine: slower, measured the same.
    """
    own = speculation.options
    if not isinstance(own, DraftModelOptions) or not isinstance(own.model, str | Path):
        return speculation
    draft = load_named(own, target.model.info)
    return replace(speculation, options=replace(own, model=draft, quantization="auto"))  # as far as loading goes


def _config(speculation: Speculation) -> dict[str, Any]:
    """What `parse` made this of."""
    parts = (speculation.common, speculation.options)
    values = {spec.name: getattr(part, spec.name) for part in parts for spec in fields(part)}
    return {"method": speculation.method, **values}


def _units(work: _Work) -> list[_Unit]:
    """Batches of ``concurrency`` prompts of one category, in the order in which the first prompt of each came."""
    open_units: dict[str, list[int]] = {}
    batches: list[list[int]] = []
    for index, prompt in enumerate(work.prompts):
        batch = open_units.get(prompt.category)
        if batch is None or len(batch) == work.options.concurrency:
            batch = open_units[prompt.category] = []
            batches.append(batch)
        batch.append(index)
    return [_Unit(i, work.prompts[batch[0]].category, tuple(batch)) for i, batch in enumerate(batches)]


def _measure(work: _Work, progress: Progress) -> None:
    for repeat in range(work.options.repeats):
        llms = [LLM.from_model(work.target, speculative_config=c, **asdict(work.engine)) for c in work.configs]
        clocks = [Clock(llm.engine) for llm in llms]
        for llm, clock in zip(llms, clocks, strict=True):
            _warm_up(work, llm, clock)
        for unit in _units(work):
            for variant in _rotated(work.variants, unit.index + repeat):
                progress.show(f"{variant.method} K {variant.num_drafted}" if variant.index else "plain decoding")
                work.runs.append(_run(work, llms[variant.index], clocks[variant.index], variant, unit, repeat))
                progress.advance()


def _rotated(variants: Sequence[Variant], by: int) -> Iterator[Variant]:
    start = by % len(variants)
    yield from (*variants[start:], *variants[:start])


def _warm_up(work: _Work, llm: LLM, clock: Clock) -> None:
    """Touch weights, pages and code paths with a short request that no run repeats in full."""
    params = replace(work.params, max_tokens=min(_WARMUP_TOKENS, work.params.max_tokens))
    _drive(llm, clock, [work.ids[0][:_WARMUP_ROWS]], params)


def _run(work: _Work, llm: LLM, clock: Clock, variant: Variant, unit: _Unit, repeat: int) -> Run:
    """One batch with one variant."""
    failed, passes = llm.engine.num_failed_drafts, _draft_passes(llm)
    requests, decoding = _drive(llm, clock, [work.ids[i] for i in unit.prompts], work.params)
    for index, request in zip(unit.prompts, requests, strict=True):
        if request.error:
            raise PilotfishError(f"{work.prompts[index].name}: {request.error}")
    return Run(
        variant=variant.index,
        unit=unit.index,
        category=unit.category,
        repeat=repeat,
        num_tokens=decoding.num_tokens,
        seconds=decoding.seconds,
        first_token_seconds=tuple(decoding.first_token[request.id] for request in requests),
        outputs=tuple((i, tuple(r.output)) for i, r in zip(unit.prompts, requests, strict=True)),
        steps=tuple(decoding.steps),
        num_failed_drafts=llm.engine.num_failed_drafts - failed,
        num_draft_passes=_draft_passes(llm) - passes,
    )


def _trace(work: _Work, file: TraceFile) -> None:
    """Everything once more, with fresh engines, for the records: writing them would count in what was measured."""
    for variant, config in zip(work.variants, work.configs, strict=True):
        llm = LLM.from_model(work.target, speculative_config=config, **asdict(work.engine))
        clock = Clock(llm.engine)
        for unit in _units(work):
            names = [work.prompts[i].name for i in unit.prompts]
            about: Json = {"variant": variant.method, "K": variant.num_drafted, "prompts": names}
            listen(llm.engine, llm.tokenizer, lambda one, about=about: file.write(about | one))  # type: ignore[misc]
            _drive(llm, clock, [work.ids[i] for i in unit.prompts], work.params)


def _draft_passes(llm: LLM) -> int:
    """Of the models that draft; 0 for drafters that have none."""
    return sum(getattr(arm, "num_passes", 0) for arm, _ in llm.engine.arms)


@dataclass(slots=True)
class _Decoding:
    """What `_drive` timed. num_tokens, seconds: after the step in which the last of the batch got its first token."""

    first_token: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    seconds: float = 0.0
    steps: list[TimedStep] = field(default_factory=list)


def _drive(
    llm: LLM, clock: Clock, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[Request], _Decoding]:
    """Run prompts to their end as one batch, under the clock. Leaves no request behind, interrupted or not."""
    tokenizer, decoding = llm.tokenizer, _Decoding()
    text_stream = None if tokenizer is None else lambda: Detokenizer(tokenizer)  # part of what serving costs
    requests: list[Request] = []
    begin = time.perf_counter()
    all_started = None
    try:
        for prompt in prompts:
            requests += llm.engine.add(prompt, params, text_stream=text_stream)
        while any(not request.finish for request in requests):
            events, timed = clock.step()
            now = time.perf_counter()
            for event in events:
                if event.tokens:
                    decoding.first_token.setdefault(event.request.id, now - begin)
            if timed is not None:
                decoding.steps.append(timed)
            if all_started is not None:
                decoding.num_tokens += sum(len(event.tokens) for event in events)
                decoding.seconds = now - all_started
            elif len(decoding.first_token) == len(requests):
                all_started = now
    finally:
        for request in requests:
            llm.engine.abort(request)
    return requests, decoding


def _agreement(work: _Work) -> dict[int, dict[int, Divergence | None]]:
    """{variant: {prompt: where its text first parts from plain decoding's, or None}}, over all repeats.

    Plain decoding itself is compared with its own first repeat.
    """
    plain: dict[int, tuple[int, ...]] = {}
    for run in work.runs:
        if run.variant == 0:
            for prompt, output in run.outputs:
                plain.setdefault(prompt, output)
    found: dict[int, dict[int, Divergence | None]] = {}
    for run in work.runs:
        for prompt, output in run.outputs:
            if prompt not in plain or found.get(run.variant, {}).get(prompt) is not None:
                continue
            at = first_difference(plain[prompt], output)
            divergence = None if at is None else _divergence(work, prompt, at, plain[prompt], output)
            found.setdefault(run.variant, {})[prompt] = divergence
    return found


def _divergence(work: _Work, prompt: int, at: int, plain: Sequence[int], output: Sequence[int]) -> Divergence:
    apart = None
    if at < min(len(plain), len(output)):
        prefix = join(*work.target.model.info.opening(work.ids[prompt])) + tuple(plain[:at])
        apart = margin(work.target.model, prefix, plain[at], output[at], work.params)
    return Divergence(work.prompts[prompt].name, at, apart)
