"""Costs by number of rows: never falling, deaf to one bad measurement; a slow machine is no reason to draft less."""

import random

import pytest

from pilotfish.engine.curve import CostCurve, DraftCosts


def test_costs_never_fall_and_go_on_beyond_the_last_point() -> None:
    costs = CostCurve({1: 1.0, 4: 0.9, 8: 2.0, 16: 4.0})
    seconds = [costs.seconds(rows) for rows in range(1, 100)]
    assert seconds == sorted(seconds)
    assert costs.seconds(1) == costs.seconds(4) == 0.9
    assert costs.seconds(24) == pytest.approx(6.0)
    assert costs.seconds(96) == pytest.approx(24.0)


def test_one_bad_measurement_at_the_start_does_no_harm() -> None:
    """2 rows were timed while another process ran: 8 rows bound them."""
    costs = CostCurve({1: 1.0, 2: 5.0, 4: 1.1, 8: 1.3})
    assert costs.seconds(2) == 1.1


def test_what_slows_everything_changes_no_ratio() -> None:
    costs, source = CostCurve({1: 1.0, 8: 1.4, 16: 3.0}), random.Random(0)
    for _ in range(200):
        rows = source.choice([1, 3, 6])
        costs.observe(rows, 2 * (1 + 0.4 * (rows - 1) / 7))
    assert costs.seconds(1) == pytest.approx(2.0, rel=0.02)
    assert costs.seconds(16) / costs.seconds(1) == pytest.approx(3.0, rel=0.05)


def test_what_slows_some_rows_alone_is_learnt() -> None:
    costs, source = CostCurve({1: 1.0, 8: 1.4}), random.Random(0)
    for _ in range(2000):
        rows = source.choice([1, 2, 5])
        costs.observe(rows, 3.0 if rows == 5 else 1.0)
    assert costs.seconds(5) / costs.seconds(1) == pytest.approx(3.0, rel=0.1)
    assert costs.seconds(8) >= costs.seconds(5)


def test_an_outlier_is_held_back() -> None:
    costs = CostCurve({1: 1.0, 8: 1.4})
    costs.observe(8, 1000.0)
    assert costs.seconds(8) < 1.7


def test_nothing_known() -> None:
    costs = CostCurve()
    assert costs.seconds(3) == 0.0
    costs.observe(100, 1.0)
    assert costs.seconds(3) == 0.0
    costs.observe(4, 1.0)
    assert 0 < costs.seconds(2) < costs.seconds(4) == 1.0


def test_drafts_of_one_length_make_a_line_through_zero() -> None:
    costs = DraftCosts()
    assert costs.seconds(4) == 0.0
    for _ in range(5):
        costs.observe(4, 2.0)
    assert costs.seconds(2) == pytest.approx(1.0)
    assert costs.seconds(0) == 0.0


@pytest.mark.parametrize(("base", "slope"), [(0.0, 1.0), (2.0, 0.5), (3.0, 0.0)])
def test_drafts_of_several_lengths_tell_base_and_slope(base: float, slope: float) -> None:
    costs, source = DraftCosts(), random.Random(0)
    for _ in range(200):
        length = source.choice([1, 2, 4, 7])
        costs.observe(length, (base + slope * length) * source.uniform(0.95, 1.05))
    for length in (1, 3, 8):
        assert costs.seconds(length) == pytest.approx(base + slope * length, rel=0.15)


def test_costs_of_drafts_never_fall_with_length_and_one_odd_call_does_little() -> None:
    costs = DraftCosts()
    for length, seconds in ((1, 3.0), (4, 2.0), (8, 1.0)):
        costs.observe(length, seconds)
    assert 0 < costs.seconds(1) <= costs.seconds(8)
    before = costs.seconds(4)
    costs.observe(4, 1000.0)
    assert costs.seconds(4) < 1.5 * before
