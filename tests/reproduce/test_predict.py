"""Predictions against the formulas by hand, and that nothing lies between formula and measurement but the factors."""

import math

import pytest

from pilotfish.reproduce import paper
from pilotfish.reproduce.predict import Prediction


def prediction(**changes: float) -> Prediction:
    values: dict[str, float] = {"num_drafted": 3, "alpha": 0.6, "c": 0.1, "rows": 1.2, "tokens": 2.4, "cost": 1.55,
                                "measured": 1.5}  # fmt: skip
    return Prediction(**(values | changes))  # type: ignore[arg-type]


def test_the_formula_is_the_papers() -> None:
    alpha, c, k = 0.6, 0.1, 3
    assert prediction().formula == pytest.approx((1 - alpha ** (k + 1)) / ((1 - alpha) * (k * c + 1)))


def test_rows_and_runs_enter_where_they_belong() -> None:
    own = prediction(tokens_of_runs=2.3)
    assert own.with_rows == pytest.approx((1 + 0.6 + 0.36 + 0.216) / (0.3 + 1.2))
    assert own.with_runs == pytest.approx(2.3 / 1.5)
    assert prediction().with_runs == pytest.approx(prediction().with_rows)  # unknown: independent places


def test_the_factors_are_all_there_is() -> None:
    own = prediction(tokens_of_runs=2.3)
    assert math.prod(own.factors) == pytest.approx(own.measured / own.formula)
    assert own.off == pytest.approx(1.5 / (2.3 / 1.5) - 1)


def test_the_largest_factor_is_told_first() -> None:
    assert prediction(tokens=1.5, measured=0.95).explain().startswith("1.50 tokens a pass where")
    told = prediction(cost=3.0, tokens=2.2, measured=0.73, rows=2.7).explain()
    assert told.startswith("a pass with its drafting costs 3.00 of a plain one where the formula has 1.30, for 4 rows")
    told = prediction(rows=1.0, cost=1.3, tokens=2.176, measured=2.176 / 1.3).explain()
    assert told == "nothing of note"


def test_the_papers_predictions_follow_from_its_numbers() -> None:
    """Negative control of what was copied: alpha, c and K give the prediction that stands beside them, as rounded."""
    for row in paper.SPEEDS:
        found = prediction(num_drafted=row.num_drafted, alpha=row.alpha, c=row.c).formula
        assert found == pytest.approx(row.predicted, abs=0.16), row
    assert {(row.draft, row.temperature) for row in paper.SPEEDS if row.measured > row.predicted}
