"""The arithmetic from runs to rows, on runs made up by hand."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from pilotfish.bench.clock import Outcome, TimedStep
from pilotfish.bench.results import (
    ALL,
    AUTO,
    Divergence,
    Row,
    Run,
    Variant,
    acceptance_by_position,
    alpha,
    rows_of,
    yields,
)
from pilotfish.decoding.theory import expected_tokens, walltime_factor

PLAIN, METHOD = Variant(0, "none", 0), Variant(1, "ngram", 3, "n-grams")
# Drafted and judged positions, accepted ones.
OUTCOMES = [Outcome(3, 3), Outcome(3, 1), Outcome(3, 0), Outcome(1, 1), Outcome(0, 0)]


def step(outcomes: list[Outcome], draft: float = 0.0, run: float = 1.0, num_rows: int | None = None) -> TimedStep:
    rows = sum(o.drafted + 1 for o in outcomes) if num_rows is None else num_rows
    return TimedStep(draft + run + 0.5, draft, run, rows, tuple(outcomes))


def a_run(variant: int, unit: int, rate: float, repeat: int = 0, category: str = "qa", **others: Any) -> Run:
    """A run of 10 tokens at this rate."""
    given: dict[str, Any] = {
        "num_tokens": 10,
        "seconds": 10 / rate,
        "first_token_seconds": (0.5,),
        "outputs": ((unit, (1, 2)),),
    }
    return Run(variant=variant, unit=unit, category=category, repeat=repeat, **(given | others))


def row_of(runs: list[Run], variant: Variant = METHOD, category: str = ALL, **others: Any) -> Row:
    given: dict[str, Any] = {"agreement": {}, "prompt_categories": ["qa"] * 9}
    rows = rows_of(runs, [variant], 0.0, **(given | others))
    (row,) = [row for row in rows if row.category == category]
    return row


def test_acceptance_by_position_is_conditional() -> None:
    # Position 1 was judged four times and stood three times; 2 was judged in the two long drafts that got there.
    assert acceptance_by_position(OUTCOMES) == [3 / 4, 1 / 2, 1.0]
    assert acceptance_by_position([Outcome(0, 0)]) == []
    assert acceptance_by_position([Outcome(4, 0)]) == [0.0]


def test_alpha_does_not_count_what_was_never_judged() -> None:
    assert alpha(OUTCOMES) == 5 / 7  # 3 + 1 + 0 + 1 accepted, two drafts ended in a rejection
    assert alpha([Outcome(0, 0)]) is None
    assert alpha([Outcome(9, 0)]) == 0.0


def test_yields_count_what_was_not_drafted_as_not_accepted() -> None:
    assert yields(OUTCOMES) == [3 / 5, 1 / 3, 1.0]
    mean = 1 + sum(outcome.accepted for outcome in OUTCOMES) / len(OUTCOMES)
    assert expected_tokens(yields(OUTCOMES), 3) == pytest.approx(mean)
    assert yields([]) == yields([Outcome(2, 0)]) == []


def test_a_speedup_is_paired_within_prompt_and_repeat() -> None:
    runs = [
        # Prompt 0: ratios 2, 3, 10, whose median is 3; the machine was ten times slower in the second repeat.
        *(a_run(0, 0, rate, r) for r, rate in enumerate([10, 1, 10])),
        *(a_run(1, 0, rate, r) for r, rate in enumerate([20, 3, 100])),
        # Prompt 1: 1 in all repeats.
        *(a_run(0, 1, 5, r) for r in range(3)),
        *(a_run(1, 1, 5, r) for r in range(3)),
    ]
    row = row_of(runs)
    assert row.speedup == pytest.approx((3 + 1) / 2)
    assert row.speedup_spread == pytest.approx((1.0, 6.5))
    assert row.tokens_per_second == pytest.approx(5.0)  # of 20, 3, 100, 5, 5, 5
    assert row_of(runs, PLAIN).speedup == 1.0
    assert row.num_prompts == 2


def test_runs_without_their_pair_are_left_out() -> None:
    runs = [a_run(0, 0, 10), a_run(1, 0, 20), a_run(1, 1, 99)]
    assert row_of(runs).speedup == pytest.approx(2)
    assert row_of([a_run(0, 0, 10), a_run(1, 1, 99)]).speedup is None


def test_a_text_that_ends_with_its_first_step_has_no_speed() -> None:
    over = a_run(1, 0, 1.0, num_tokens=0, seconds=0.0)
    row = row_of([a_run(0, 0, 10), over])
    assert row.tokens_per_second is None
    assert row.speedup is row.speedup_spread is row.mean_acceptance_length is row.c is None


def test_rows_are_split_by_category_and_end_with_all() -> None:
    runs = [a_run(v, u, 10.0, category=c) for v, (u, c) in itertools.product((0, 1), enumerate(("qa", "math")))]
    rows = rows_of(runs, [PLAIN, METHOD], 0.0, {}, ["qa", "math"])
    assert [(row.method, row.category) for row in rows] == [
        ("none", "qa"),
        ("none", "math"),
        ("none", ALL),
        ("ngram", "qa"),
        ("ngram", "math"),
        ("ngram", ALL),
    ]
    assert rows_of([], [PLAIN, METHOD], 0.0, {}, []) == []


def test_costs_and_predictions() -> None:
    plain = [step([Outcome(0, 0)], run=2.0)] * 4
    # Four steps: three with full drafts, which take 3.0, and one without, which takes 2.0.
    steps = [
        step([Outcome(3, 3)], draft=0.6, run=3.0),
        step([Outcome(3, 1)], draft=0.6, run=3.0),
        step([Outcome(3, 0)], draft=0.6, run=3.0),
        step([Outcome(0, 0)], draft=0.2, run=2.0),
    ]
    row = row_of([a_run(0, 0, 1.0, steps=tuple(plain)), a_run(1, 0, 1.0, steps=tuple(steps))])
    assert row.c == pytest.approx(2.0 / 9 / 2.0)
    assert row.verify_ratio == pytest.approx(1.5)
    assert row.pass_ratio == pytest.approx(2.75 / 2.0)
    assert row.mean_acceptance_length == pytest.approx(2.0)
    cost = 0.5 / 2.0  # drafting of a mean step, in plain passes
    assert row.predicted_speedup == pytest.approx(2.0 / (1 + cost))
    assert row.predicted_speedup_measured_verify == pytest.approx(2.0 / (1.375 + cost))
    assert row.engine_seconds_per_step == pytest.approx(0.5)
    assert row.num_steps == 4


def test_the_prediction_is_the_papers_where_every_step_drafts() -> None:
    steps = [step([Outcome(2, a)], draft=0.2, run=1.0) for a in (2, 2, 1, 0)]
    row = row_of([a_run(0, 0, 1.0, steps=(step([Outcome(0, 0)]),)), a_run(1, 0, 1.0, steps=tuple(steps))])
    assert row.predicted_speedup == pytest.approx(walltime_factor(row.acceptance_by_position, 2, c=row.c or 0.0))


def test_plain_decoding_predicts_itself() -> None:
    row = row_of([a_run(0, 0, 1.0, steps=(step([Outcome(0, 0)], draft=0.1),) * 3)], PLAIN)
    assert (row.predicted_speedup, row.pass_ratio, row.mean_acceptance_length) == (1.0, 1.0, 1.0)
    assert row.alpha is row.c is None
    assert row.acceptance_by_position == []


def test_of_a_batch_drafting_counts_once() -> None:
    plain = step([Outcome(0, 0)] * 2, run=1.0)
    drafted = step([Outcome(3, 3), Outcome(1, 0)], draft=0.4, run=1.0)
    row = row_of([a_run(0, 0, 1.0, steps=(plain,)), a_run(1, 0, 1.0, steps=(drafted,))])
    assert row.c == pytest.approx(0.4 / 2.0)  # two positions a sequence
    assert row.verify_ratio is None  # no pass over 2 * (3 + 1) rows
    assert row.mean_acceptance_length == pytest.approx(2.5)


def test_verify_ratio_needs_full_drafts_and_a_fixed_k() -> None:
    plain, full = step([Outcome(0, 0)], run=1.0), step([Outcome(3, 0)], run=4.0)
    short = step([Outcome(1, 1)], run=100.0)
    runs = [a_run(0, 0, 1.0, steps=(plain,)), a_run(1, 0, 1.0, steps=(full, short))]
    assert row_of(runs).verify_ratio == pytest.approx(4.0)
    assert row_of(runs, replace(METHOD, num_drafted=AUTO)).verify_ratio is None


def test_agreement_is_told_per_category() -> None:
    runs = [a_run(v, u, 10.0, category=c) for v, (u, c) in itertools.product((0, 1), enumerate(("qa", "math")))]
    parts = Divergence("line 2", 7, 1e-6)
    given = {"agreement": {0: {0: None, 1: None}, 1: {0: None, 1: parts}}, "prompt_categories": ["qa", "math"]}
    assert row_of(runs, category="qa", **given).identical is True
    assert row_of(runs, category="math", **given).identical is False
    assert row_of(runs, **given).divergences == [parts]
    assert row_of(runs, PLAIN, **given).identical is True
    assert row_of(runs).identical is None  # nothing was compared
