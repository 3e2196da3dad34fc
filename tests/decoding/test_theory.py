"""The paper's formulas against the paper's own figures (Leviathan et al. 2023), and against each other."""

import math

import pytest
import torch

from pilotfish.decoding.theory import (
    alpha_of,
    best_num_drafted,
    expected_tokens,
    operations_factor,
    survival,
    walltime_factor,
)


@pytest.mark.parametrize(
    ("alpha", "num_drafted", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1(alpha, num_drafted, operations, speed):
    """A drafter that costs nothing."""
    assert operations_factor(alpha, num_drafted, 0) == pytest.approx(operations, abs=0.005)
    assert walltime_factor(alpha, num_drafted, 0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "num_drafted", "c", "predicted"),
    [
        (0.75, 7, 0.02, 3.2),
        (0.80, 7, 0.04, 3.3),
        (0.82, 7, 0.11, 2.5),
        (0.62, 7, 0.02, 2.3),
        (0.68, 5, 0.04, 2.4),
        (0.71, 3, 0.11, 2.0),
        (0.65, 5, 0.02, 2.4),
        (0.73, 5, 0.04, 2.6),
        (0.53, 5, 0.02, 1.9),
        (0.55, 3, 0.04, 1.8),
        (0.56, 3, 0.11, 1.6),
    ],
)
def test_predictions_of_table_4(alpha, num_drafted, c, predicted):
    assert walltime_factor(alpha, num_drafted, c) == pytest.approx(predicted, abs=0.1)


@pytest.mark.parametrize(
    ("c", "row"),
    [
        (0.01, [(5, 1.88), (7, 2.30), (9, 2.97), (14, 4.23), (24, 7.49)]),
        (0.02, [(4, 1.79), (6, 2.17), (8, 2.76), (11, 3.82), (19, 6.37)]),
        (0.05, [(3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)]),
        (0.10, [(2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)]),
        (0.20, [(1, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)]),
    ],
)
def test_the_best_number_to_draft(c, row):
    for alpha, (num_drafted, speed) in zip((0.5, 0.6, 0.7, 0.8, 0.9), row, strict=True):
        assert best_num_drafted(alpha, c) == num_drafted
        assert walltime_factor(alpha, num_drafted, c) == pytest.approx(speed, abs=0.005)


def test_expected_tokens_is_the_closed_form():
    for alpha in (0.0, 0.3, 0.99):
        for num_drafted in range(12):
            closed = (1 - alpha ** (num_drafted + 1)) / (1 - alpha)
            assert expected_tokens(alpha, num_drafted) == pytest.approx(closed, rel=1e-12)
    assert expected_tokens(1, 5) == 6
    assert expected_tokens(0.7, 0) == 1


def test_one_alpha_per_position():
    assert survival([0.9, 0.5, 0.2], 3) == pytest.approx([0.9, 0.45, 0.09])
    assert expected_tokens([0.9, 0.5, 0.2], 3) == pytest.approx(2.44)
    assert expected_tokens([0.6] * 4, 4) == pytest.approx(expected_tokens(0.6, 4))
    assert expected_tokens([0.9, 0.5], 5) == pytest.approx(2.35), "beyond the last known position nothing is accepted"
    # Good at first, useless from the third on: drafting two is right, though the mean alpha would say more.
    assert best_num_drafted([0.9, 0.9, 0.0, 0.0], 0.05) == 2


def test_one_drafted_token():
    for alpha, c in ((0.3, 0.1), (0.8, 0.5)):
        assert walltime_factor(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))


@pytest.mark.parametrize(("alpha", "c"), [(0.0, 0.0), (0.0, 0.1), (0.1, 0.5), (0.3, 0.3), (0.2, 5.0)])
def test_where_drafting_does_not_pay_nothing_is_drafted(alpha, c):
    assert best_num_drafted(alpha, c) == 0


def test_drafting_pays_exactly_where_alpha_exceeds_c():
    """Corollary 3.9, under the paper's assumption that checking is free."""
    for alpha in (0.05, 0.2, 0.5, 0.9):
        assert best_num_drafted(alpha, alpha * 0.99) > 0
        assert best_num_drafted(alpha, alpha * 1.01) == 0


def test_the_cost_of_checking_counts():
    linear = [1.0, 2.0, 3.0, 4.0, 5.0]  # every row costs as much as a pass of its own
    assert best_num_drafted(0.95, 0.0, verify=linear) == 0
    assert best_num_drafted(0.95, 0.0, verify=[1.0] * 5) == 4, "no further than the costs are known"
    assert best_num_drafted(0.8, 0.0, verify=[1.0, 1.1, 1.2, 4.0]) == 2, "stop before the step"
    assert best_num_drafted(0.8, 0.0, most=1, verify=[1.0, 1.1, 1.2]) == 1
    assert walltime_factor(0.5, 2, 0.1, verify=1.8) == pytest.approx(1.75 / 2.0)


def test_limits():
    assert best_num_drafted(0.99, 0.0, most=0) == 0
    assert best_num_drafted(0.99, 0.0, most=3) == 3
    assert best_num_drafted(1.0, 0.0) == 63
    assert best_num_drafted(0.9, 0.0, verify=[]) == 0


def test_alpha_is_1_minus_the_total_variation():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        p_V, q_V = torch.rand(2, 9, generator=generator, dtype=torch.float64).softmax(1)
        distance = float((p_V - q_V).abs().sum()) / 2
        assert math.isclose(alpha_of(p_V, q_V), 1 - distance, abs_tol=1e-12)
        assert alpha_of(p_V, q_V) == alpha_of(q_V, p_V)
        assert math.isclose(alpha_of(p_V, p_V), 1, abs_tol=1e-12)
    assert alpha_of(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 0
