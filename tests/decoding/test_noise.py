"""Noise: pinned values (a seed's text must survive upgrades), independent keys, inverse CDF and race to the edge."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pilotfish.decoding.noise import Lane, SeededNoise, exponentials, fold, invert_cdf, race, uniform

BELOW_1 = math.nextafter(1.0, 0.0)
UNLIKELY = 1e-4
LANES = (Lane.DRAFT, Lane.ACCEPT, Lane.RESIDUAL)


def test_pinned_values():
    """A change here changes the text of every seed anybody has written down."""
    assert uniform(0, 0, Lane.DRAFT) == 0.532341430967833
    assert uniform(0, 0, Lane.ACCEPT) == 0.20789150325232864
    assert uniform(0, 1, Lane.DRAFT) == 0.8028846068516142
    assert uniform(1, 0, Lane.DRAFT) == 0.9903498158259257
    assert uniform(0, 0, Lane.DRAFT, 1) == 0.9057965172187422
    assert uniform(2**64 - 1, 7, Lane.RESIDUAL, 3) == 0.2009834995682448
    expected = [0.35511233314379465, 1.4230213864905767, 1.583421557601615, 0.527259814685537]
    assert exponentials(0, 0, 4).tolist() == expected
    assert exponentials(12345, 678, 3).tolist() == [2.408310310507501, 0.5088311879129963, 1.1240671198849532]
    assert [fold(7, choice) for choice in range(3)] == [7, 15021869907645055088, 17651135764691165609]


def test_seeds_are_taken_modulo_64_bits():
    assert uniform(-1, 7, Lane.RESIDUAL) == uniform(2**64 - 1, 7, Lane.RESIDUAL)
    assert uniform(2**64 + 5, 7, Lane.RESIDUAL) == uniform(5, 7, Lane.RESIDUAL)


def test_uniforms_are_53_bit_fractions():
    for seed in range(200):
        u = uniform(seed, 0, Lane.ACCEPT)
        assert 0 <= u < 1
        assert (u * 2.0**53).is_integer()


@pytest.mark.parametrize(
    "numbers",
    [
        lambda i: uniform(i, 0, Lane.ACCEPT),
        lambda i: uniform(0, i, Lane.ACCEPT),
        lambda i: uniform(0, 0, Lane.ACCEPT, i),
        lambda i: uniform(i % 100, i // 100, LANES[i % 3], i % 7),
    ],
    ids=["seeds", "positions", "indices", "mixed"],
)
def test_uniforms_are_uniform_and_neighbours_independent(numbers):
    u = np.array([numbers(i) for i in range(20_000)])
    assert stats.kstest(u, "uniform").pvalue > UNLIKELY
    pairs, *_ = np.histogram2d(u[:-1], u[1:], bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > UNLIKELY


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(Lane, 2)))
def test_lanes_are_independent(one, other):
    u, v = (np.array([uniform(seed, 3, lane) for seed in range(10_000)]) for lane in (one, other))
    pairs, *_ = np.histogram2d(u, v, bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(pairs.ravel()).pvalue > UNLIKELY
    control, *_ = np.histogram2d(u, u, bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(control.ravel()).pvalue < 1e-100


def test_no_two_keys_share_a_number():
    keys = list(itertools.product(range(8), range(8), Lane, range(8)))
    assert len({uniform(*key) for key in keys}) == len(keys)


# Exponentials.


def test_the_first_exponentials_do_not_depend_on_how_many_there_are():
    """A target of 152,064 rows and a drafter of 151,936 share the race of the ids they have in common."""
    many = exponentials(5, 6, 5000)
    assert many.dtype == torch.float64
    for num_tokens in (1, 2, 3, 1000, 4999):
        assert torch.equal(exponentials(5, 6, num_tokens), many[:num_tokens])


def test_exponentials_are_unit_exponentials_above_0():
    draws = torch.cat([exponentials(seed, 1, 200) for seed in range(100)]).numpy()
    assert stats.kstest(draws, "expon").pvalue > UNLIKELY
    assert draws.min() > 0
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_exponentials_of_other_seeds_and_positions_are_others():
    draws = {exponentials(seed, position, 1).item() for seed in range(20) for position in range(20)}
    assert len(draws) == 400


# Inverse CDF.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "weights", [[0, 1, 0], [0, 0.5, 0, 0.5, 0], [1, 0, 0], [0, 0, 1], [1e-30, 0, 1], [0.1, 0, 0.1]]
)
def test_a_weight_of_0_is_never_picked(weights, dtype):
    weights_V = torch.tensor(weights, dtype=dtype)
    for u in (0.0, 5e-324, 1e-300, 1e-17, 0.25, 0.5, math.nextafter(0.5, 0), math.nextafter(0.5, 1), 0.75, BELOW_1):
        assert weights[invert_cdf(weights_V, u)] > 0, u


def test_edges_belong_to_the_upper_cell():
    weights_V = torch.tensor([0.25, 0.25, 0.5])
    cases = {0.0: 0, math.nextafter(0.25, 0): 0, 0.25: 1, math.nextafter(0.5, 0): 1, 0.5: 2, BELOW_1: 2}
    assert {u: invert_cdf(weights_V, u) for u in cases} == cases


def test_the_last_id_with_weight_is_picked_where_rounding_reaches_the_total():
    """0.1 + ... + 0.1 sums to something that BELOW_1 times it may round up to."""
    for num_tokens in range(1, 60):
        for scale in (0.1, 1 / 3, 1e-12, 7e11):
            weights_V = torch.full((num_tokens + 2,), scale, dtype=torch.float64)
            weights_V[-2:] = 0
            assert invert_cdf(weights_V, BELOW_1) == num_tokens - 1


def test_quantiles_are_exact_in_float64_for_float32_weights():
    """100,000 equal float32 weights: a float32 running sum would be off by many ids at the far end."""
    weights_V = torch.full((100_000,), 1e-5)
    for token in (0, 1, 49_999, 77_777, 99_999):
        assert invert_cdf(weights_V, (token + 0.5) / 100_000) == token


def test_only_the_proportions_of_weights_count():
    weights_V = torch.tensor([3.0, 1.0, 0.0, 4.0])
    for i in range(160):
        u = (i + 0.5) / 160
        assert invert_cdf(weights_V, u) == invert_cdf(weights_V / 8, u) == (0 if u < 3 / 8 else 1 if u < 0.5 else 3)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
def test_weights_that_are_no_law_are_our_own_mistake(weights):
    with pytest.raises(AssertionError, match="weights sum to"):
        invert_cdf(torch.tensor(weights), 0.5)


# The race.


def test_the_winner_of_the_race_has_the_law():
    p_V = torch.tensor([0.02, 0.08, 0.4, 0.0, 0.3, 0.2], dtype=torch.float64)
    wins = np.bincount([race(seed, 9, p_V) for seed in range(20_000)], minlength=6)
    assert wins[3] == 0
    assert stats.chisquare(np.delete(wins, 3), np.delete(p_V.numpy(), 3) * 20_000).pvalue > UNLIKELY


def test_winners_at_consecutive_positions_are_independent():
    p_V = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    winners = [race(3, position, p_V) for position in range(10_001)]
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (winners[:-1], winners[1:]), 1)
    assert stats.chisquare(pairs.ravel(), np.outer(p_V, p_V).ravel() * 10_000).pvalue > UNLIKELY


def test_the_race_depends_on_proportions_alone_and_equal_laws_agree():
    p_V = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for seed in range(200):
        assert race(seed, 0, p_V) == race(seed, 0, p_V * 1e-200) == race(seed, 0, torch.cat([p_V, torch.zeros(9)]))


def test_laws_that_share_the_race_agree_more_often_than_chance():
    """At least (1 - TV) / (1 + TV) (Daliri et al. 2024, arXiv 2408.07978); independent draws: the sum of p q."""
    p_V, q_V = torch.tensor([0.5, 0.3, 0.1, 0.1]), torch.tensor([0.4, 0.2, 0.2, 0.2])
    distance = float((p_V - q_V).abs().sum() / 2)
    num_seeds = 5_000
    agreed = sum(race(seed, 0, p_V) == race(seed, 0, q_V) for seed in range(num_seeds)) / num_seeds
    assert agreed > (1 - distance) / (1 + distance) - 3 * math.sqrt(0.25 / num_seeds)
    assert agreed > 2 * float(p_V @ q_V)


# Requests' seeds and the noise of one pass.


def test_the_first_choice_keeps_the_seed_and_the_others_are_far_from_it():
    seeds = [fold(seed, choice) for seed in range(50) for choice in range(20)]
    assert [fold(seed, 0) for seed in range(50)] == list(range(50))
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_accept_is_strict():
    """Nothing passes with probability 0, even if the number is 0; everything passes with 1 or more."""
    for seed in range(200):
        noise = SeededNoise(seed, 4)
        assert not noise.accept(0, 0, 0.0)
        assert noise.accept(0, 0, 1.0)
        assert noise.accept(0, 0, 3.5)
        u = uniform(seed, 4, Lane.ACCEPT, 0)
        assert not noise.accept(0, 0, u)
        assert noise.accept(0, 0, math.nextafter(u, 1))


def test_all_coins_of_a_pass_differ():
    """Other depths, siblings and lanes, and other passes, even where they reach the same place in the text."""
    seen = {}
    weights_V = torch.ones(2**20, dtype=torch.float64)
    for position, depth, index in itertools.product(range(4), range(4), range(4)):
        noise = SeededNoise(1, position)
        seen[(Lane.DRAFT, position, depth, index)] = noise.draw(depth, weights_V, index)
        seen[(Lane.ACCEPT, position, depth, index)] = coin(noise, depth, index)
        if index == 0:
            seen[(Lane.RESIDUAL, position, depth)] = noise.choose(depth, weights_V)
    assert len(set(seen.values())) == len(seen)


def coin(noise, depth, sibling):
    """The number behind `accept`, to 20 bits, by bisection."""
    low, high = 0, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if noise.accept(depth, sibling, middle / 2**20) else (middle, high)
    return low


def test_the_race_alone_belongs_to_a_place_in_the_text():
    p_V = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert SeededNoise(1, 3).race(4, p_V) == SeededNoise(1, 7).race(0, p_V) == race(1, 7, p_V)
    assert len({race(1, position, p_V) for position in range(20)}) > 10


def test_no_generator_is_advanced():
    """Whatever else was drawn before, and in whatever order, a number stays the same."""
    weights_V = torch.rand(50, generator=torch.Generator().manual_seed(1))
    noise = SeededNoise(3, 2)
    before = (noise.choose(1, weights_V), noise.draw(1, weights_V), noise.race(1, weights_V))
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    for depth in range(5):
        noise.draw(depth, weights_V)
        noise.race(depth, weights_V)
        SeededNoise(4, depth).choose(0, weights_V)
    assert (noise.choose(1, weights_V), noise.draw(1, weights_V), noise.race(1, weights_V)) == before
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()
