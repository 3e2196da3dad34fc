"""From runs to rows: speeds, speed-ups, acceptance, and what the paper's formula predicts. Plain numbers only.

It does not know engines, clocks or tables. The one trick: a speed-up is a ratio within one prompt and one repeat,
whose runs were neighbours in time, so what else the machine did cancels out as far as it can.

    tokens_per_second   of one run: the tokens that came after the step with the first token, over the time they took.
                        A row has the median over its prompts and repeats; spread is the 10th to 90th percentile.
    speedup             per prompt the median over repeats of the method's speed over plain decoding's; a row has the
                        mean over its prompts; spread as above, over prompts and repeats.
    mean_acceptance_length   mean over decoding steps (with or without a draft) of accepted tokens + 1
    acceptance_by_position   entry i: of the drafts that guessed position i + 1 and had all before it accepted, the
                        share whose guess there was accepted
    alpha               accepted guesses over judged guesses; those behind the first rejection are not judged
    c                   drafting time per drafted position over the time of a plain pass
    verify_ratio        median time of a pass over K + 1 rows per sequence over that of a plain one
    draft_passes_per_token   passes of a drafting model over all tokens of the texts
    pass_ratio          mean time of the method's passes, whatever they drafted, over that of a plain one
    predicted_speedup   Leviathan et al., Theorem 3.8, with these acceptances and this c, and a pass over K + 1 rows
                        as cheap as one over 1 row; predicted_speedup_measured_verify: with pass_ratio instead

Both predictions count a position that was not guessed as not accepted and spread the drafting time over all steps,
so they hold for methods that often draft nothing. The target's own choice is counted in no acceptance rate.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from ..decoding.theory import walltime_factor
from .clock import Outcome, TimedStep

ALL = "all"  # the category of a row over all prompts
Spread = tuple[float, float]
NumDrafted = int | Literal["auto"]
AUTO: Literal["auto"] = "auto"  # as many as pay, in each step
Key = tuple[str, NumDrafted, str]  # which variant: method, K, drafter


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing that is measured: a method at one K. index 0 is plain decoding; drafter: which one, in words."""

    index: int
    method: str
    num_drafted: NumDrafted
    drafter: str = ""

    @property
    def key(self) -> Key:
        return self.method, self.num_drafted, self.drafter


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of prompts of one category, once, with one variant.

    unit: which batch. num_tokens and seconds: of the decoding that is timed. first_token_seconds: per prompt.
    outputs: per prompt its index and the emitted ids.
    """

    variant: int
    unit: int
    category: str
    repeat: int
    num_tokens: int
    seconds: float
    first_token_seconds: tuple[float, ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    steps: tuple[TimedStep, ...] = ()
    num_failed_drafts: int = 0
    num_draft_passes: int = 0

    @property
    def rate(self) -> float | None:
        """Tokens per second; None if the text was over with its first step."""
        return self.num_tokens / self.seconds if self.num_tokens and self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a text first parts from plain decoding's. position: in the output, from 0. margin: by how much the target
    preferred plain decoding's token there, in logits (see `pilotfish.bench.divergence`); None if a text just ends."""

    prompt: str
    position: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one K on one category, or on ``all``. None: not measured, or does not apply."""

    method: str
    category: str
    temperature: float
    tokens_per_second: float | None
    speedup: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: list[float]
    alpha: float | None
    c: float | None
    predicted_speedup: float | None
    identical: bool | None
    divergences: list[Divergence]
    num_speculative_tokens: NumDrafted = 0
    drafter: str = ""
    tokens_per_second_spread: Spread | None = None
    speedup_spread: Spread | None = None
    time_to_first_token: float | None = None
    verify_ratio: float | None = None
    pass_ratio: float | None = None
    predicted_speedup_measured_verify: float | None = None
    engine_seconds_per_step: float | None = None
    num_prompts: int = 0
    num_steps: int = 0
    num_failed_drafts: int = 0
    nodes_per_pass: float | None = None
    draft_passes_per_token: float | None = None

    @property
    def key(self) -> Key:
        return self.method, self.num_speculative_tokens, self.drafter


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of a bench run and where it ran; `document` is their JSON. speedups: as of `speedups_of`."""

    rows: list[Row] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    speedups: dict[Key, dict[int, float]] = field(default_factory=dict)


def acceptance_by_position(outcomes: Iterable[Outcome]) -> list[float]:
    """Conditional acceptance of position 1, 2, ... (see the module); as long as the longest draft that got that far."""
    judged: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for outcome in outcomes:
        for position in range(min(outcome.drafted, outcome.accepted + 1)):
            judged[position] += 1
            accepted[position] += position < outcome.accepted
    return [accepted[position] / judged[position] for position in range(len(judged))]


def alpha(outcomes: Sequence[Outcome]) -> float | None:
    """Accepted over judged guesses; None if nothing was drafted."""
    accepted = sum(outcome.accepted for outcome in outcomes)
    rejected = sum(outcome.accepted < outcome.drafted for outcome in outcomes)
    return accepted / (accepted + rejected) if accepted + rejected else None


def yields(outcomes: Sequence[Outcome]) -> list[float]:
    """Per position, of the steps that got all before it accepted, the share that got it too, drafted or not."""
    most = max((outcome.accepted for outcome in outcomes), default=0)
    reached = [sum(outcome.accepted >= depth for outcome in outcomes) for depth in range(most + 1)]
    return [now / before for before, now in pairwise(reached)]


def rows_of(
    runs: Sequence[Run],
    variants: Sequence[Variant],
    temperature: float,
    agreement: dict[int, dict[int, Divergence | None]],
    prompt_categories: Sequence[str],
) -> list[Row]:
    """A row per variant and category, ``all`` last.

    agreement: {variant: {prompt index: where it parts from plain decoding, or None}}; empty if texts cannot be
    compared. Prompts that no run of a variant has finished (after Ctrl-C) are left out of its rows.
    """
    categories = list(dict.fromkeys(run.category for run in runs))
    plain = [run for run in runs if run.variant == 0]
    rows = []
    for variant in variants:
        own = [run for run in runs if run.variant == variant.index]
        for category in [*categories, ALL]:
            mine = [run for run in own if category in (run.category, ALL)]
            if not mine:
                continue
            compared = {
                prompt: divergence
                for prompt, divergence in agreement.get(variant.index, {}).items()
                if category in (prompt_categories[prompt], ALL)
            }
            others = [run for run in plain if category in (run.category, ALL)]
            rows.append(_row(variant, category, temperature, mine, others, compared))
    return rows


def speedups_of(runs: Sequence[Run], variants: Sequence[Variant]) -> dict[Key, dict[int, float]]:
    """{variant: {batch of prompts: its speed over plain decoding's, the median over repeats}}."""
    plain = [run for run in runs if run.variant == 0]
    return {
        variant.key: {
            unit: median(ratios)
            for unit, ratios in _ratios([run for run in runs if run.variant == variant.index], plain).items()
        }
        for variant in variants
    }


def _row(
    variant: Variant,
    category: str,
    temperature: float,
    runs: Sequence[Run],
    plain: Sequence[Run],
    compared: dict[int, Divergence | None],
) -> Row:
    steps = [step for run in runs for step in run.steps]
    outcomes = [outcome for step in steps for outcome in step.outcomes]
    rates = [run.rate for run in runs if run.rate is not None]
    speedup, ratios = _speedup(runs, plain)
    divergences = [divergence for divergence in compared.values() if divergence is not None]
    return Row(
        method=variant.method,
        category=category,
        temperature=temperature,
        tokens_per_second=median(rates) if rates else None,
        speedup=speedup,
        mean_acceptance_length=1 + fmean(outcome.accepted for outcome in outcomes) if outcomes else None,
        acceptance_by_position=acceptance_by_position(outcomes),
        alpha=alpha(outcomes),
        identical=not divergences if compared else None,
        divergences=divergences,
        num_speculative_tokens=variant.num_drafted,
        drafter=variant.drafter,
        tokens_per_second_spread=_spread(rates),
        speedup_spread=_spread(ratios),
        time_to_first_token=median(seconds for run in runs for seconds in run.first_token_seconds),
        num_prompts=len({prompt for run in runs for prompt, _ in run.outputs}),
        num_steps=len(steps),
        num_failed_drafts=sum(run.num_failed_drafts for run in runs),
        nodes_per_pass=fmean(step.num_rows / len(step.outcomes) - 1 for step in steps) if steps else None,
        draft_passes_per_token=_draft_passes(runs),
        **_costs(variant, steps, [step for run in plain for step in run.steps]),
    )


def _speedup(runs: Sequence[Run], plain: Sequence[Run]) -> tuple[float | None, list[float]]:
    """(the mean over prompts of the median over repeats, all the ratios)."""
    ratios = _ratios(runs, plain)
    flat = [ratio for of_unit in ratios.values() for ratio in of_unit]
    return (fmean(median(of_unit) for of_unit in ratios.values()) if ratios else None), flat


def _ratios(runs: Sequence[Run], plain: Sequence[Run]) -> dict[int, list[float]]:
    """{batch of prompts: speed over plain decoding's of the same repeat, for each}."""
    plain_rates = {(run.unit, run.repeat): run.rate for run in plain}
    ratios: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        slow = plain_rates.get((run.unit, run.repeat))
        if run.rate is not None and slow is not None:
            ratios[run.unit].append(run.rate / slow)
    return ratios


def _costs(variant: Variant, steps: Sequence[TimedStep], plain: Sequence[TimedStep]) -> dict[str, float | None]:
    """Everything that compares times within steps."""
    if not steps or not plain:
        return {"c": None, "predicted_speedup": None}
    plain_pass = fmean(step.pass_seconds for step in plain)
    outcomes = [outcome for step in steps for outcome in step.outcomes]
    # Of a batch the drafter drafts one position of all sequences at once: so positions are counted per sequence.
    num_positions = sum(fmean(outcome.drafted for outcome in step.outcomes) for step in steps)
    drafting = 0.0 if variant.index == 0 else sum(step.draft_seconds for step in steps)
    pass_ratio = fmean(step.pass_seconds for step in steps) / plain_pass
    each, cost = yields(outcomes), drafting / len(steps) / plain_pass
    num_yields = max(1, len(each))
    return {
        "c": drafting / num_positions / plain_pass if num_positions else None,
        "predicted_speedup": walltime_factor(each, num_yields, cost / num_yields),
        "predicted_speedup_measured_verify": walltime_factor(each, num_yields, cost / num_yields, pass_ratio),
        "verify_ratio": _verify_ratio(variant.num_drafted, steps, plain),
        "pass_ratio": pass_ratio,
        "engine_seconds_per_step": median(step.seconds - step.draft_seconds - step.pass_seconds for step in steps),
    }


def _verify_ratio(num_drafted: NumDrafted, steps: Sequence[TimedStep], plain: Sequence[TimedStep]) -> float | None:
    """Passes over K + 1 rows per sequence against plain ones, at the largest batch that has both. Not for auto."""
    if num_drafted == AUTO:
        return None
    full: dict[int, list[float]] = defaultdict(list)
    single: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.num_rows == len(step.outcomes) * (num_drafted + 1):
            full[len(step.outcomes)].append(step.pass_seconds)
    for step in plain:
        single[len(step.outcomes)].append(step.pass_seconds)
    both = full.keys() & single.keys()
    return median(full[max(both)]) / median(single[max(both)]) if both else None


def _draft_passes(runs: Sequence[Run]) -> float | None:
    """Passes of a drafting model, those over the prompt included, by tokens of text; None without such a model."""
    passes, tokens = sum(run.num_draft_passes for run in runs), sum(len(ids) for run in runs for _, ids in run.outputs)
    return passes / tokens if passes and tokens else None


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    low, high = np.percentile(values, [10, 90]).tolist()
    return low, high
