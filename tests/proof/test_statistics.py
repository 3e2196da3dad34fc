"""The chi-square: against scipy, against its own law, and on counts that it must reject."""

import math
import random

import pytest
from scipy import stats

from pilotfish.proof.statistics import LEAST_EXPECTED, Tally, upper_tail


@pytest.mark.parametrize(("chi_square", "degrees"), [(0.0, 1), (3.2, 1), (18.0, 20), (250.0, 100), (900.0, 60)])
def test_the_tail_is_scipy_s(chi_square, degrees):
    assert upper_tail(chi_square, degrees) == pytest.approx(stats.chi2.sf(chi_square, degrees), rel=1e-6)


def test_one_stratum_is_pearson_s_test():
    law = {"a": 0.5, "b": 0.3, "c": 0.2}
    tally = Tally()
    for outcome, count in (("a", 40), ("b", 45), ("c", 15)):
        for _ in range(count):
            tally.add("s", law, outcome)
    fit = tally.fit()
    reference = stats.chisquare([40, 45, 15], [50, 30, 20])
    assert (fit.chi_square, fit.num_degrees, fit.num_draws) == (pytest.approx(reference.statistic), 2, 100)
    assert fit.p_value == pytest.approx(reference.pvalue, rel=1e-6)


def test_rare_outcomes_are_pooled_by_their_law_alone():
    law = {"a": 0.96, "b": 0.02, "c": 0.01, "d": 0.01}
    tally = Tally()
    for outcome in "a" * 99 + "d":
        tally.add("s", law, outcome)
    # 96 expected, and 4 in a pool that is too small and joins them: one cell, nothing to test.
    assert (tally.fit().num_degrees, tally.fit().p_value) == (0, 1.0)
    for outcome in "a" * 90 + "d" * 10:
        tally.add("s", law, outcome)
    fit = tally.fit()
    assert fit.num_degrees == 1
    assert fit.chi_square == pytest.approx((189 - 192) ** 2 / 192 + (11 - 8) ** 2 / 8)
    assert LEAST_EXPECTED == 5


def test_an_outcome_the_law_forbids_is_fatal():
    tally = Tally()
    tally.add("s", {"a": 1.0}, "a")
    assert tally.fit().p_value == 1.0
    tally.add("s", {"a": 1.0}, "b")
    assert math.isinf(tally.fit().chi_square)
    assert tally.fit().p_value == 0.0


def _sample(seed: int, law: dict[str, dict[int, float]], drawn: dict[str, dict[int, float]], num: int) -> Tally:
    rng, tally = random.Random(seed), Tally()
    for _ in range(num):
        stratum = rng.choice(list(law))
        (outcome,) = rng.choices(list(drawn[stratum]), list(drawn[stratum].values()))
        tally.add(stratum, law[stratum], outcome)
    return tally


LAWS = {"x": {0: 0.7, 1: 0.2, 2: 0.1}, "y": dict.fromkeys(range(10), 0.1), "z": {0: 0.999, 1: 0.001}}


def test_p_values_of_a_true_law_are_uniform():
    values = [_sample(seed, LAWS, LAWS, 300).fit().p_value for seed in range(200)]
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_a_wrong_law_in_one_stratum_is_seen():
    wrong = LAWS | {"x": {0: 0.5, 1: 0.3, 2: 0.2}}
    assert _sample(1, LAWS, LAWS, 3000).fit().p_value > 1e-3
    assert _sample(1, LAWS, wrong, 3000).fit().p_value < 1e-9
