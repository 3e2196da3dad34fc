"""Plausible mistakes, each put through the very check that the real rules pass: it must catch every one.

A check that cannot fail proves nothing. These are mistakes seen in real systems: a q that is not the law the token was
drawn from, one random number used twice, a length that looks at what was drawn, and block rules that look right.
"""

import numpy as np
import pytest
import torch

from pilotfish.decoding.draft import EMPTY, Draft
from pilotfish.decoding.noise import Lane, SeededNoise, uniform
from pilotfish.decoding.verify import Verdict, verify

from .enumeration import BranchingNoise, branches, chosen, constant, deep, drawn, many_passes, one_pass, tables

CLEARLY = 0.01
EXACT = 1e-12
P, Q = tables(1, 3, 4, sharpness=1.5), tables(2, 3, 4, sharpness=1.5)
# Opposed, and with more than one token in the residual, so that *which* of them is drawn can go wrong.
P4, Q4 = constant(0.4, 0.3, 0.2, 0.1), constant(0.05, 0.15, 0.35, 0.45)


def with_probs(draft, change):
    """The same tokens with another account of where they came from."""
    return Draft(draft.tokens, draft.parents, change(draft.probs))


def sharpened(probs_nV):
    return probs_nV**2 / (probs_nV**2).sum(1, keepdim=True)


def flattened(probs_nV):
    return torch.full_like(probs_nV, 1 / probs_nV.shape[1])


# A wrong q.


@pytest.mark.parametrize("change", [sharpened, flattened])
@pytest.mark.parametrize(("rule", "widths"), [("rejection", deep(1, 1)), ("block", deep(1, 1)), ("rejection", deep(2))])
def test_a_law_the_tokens_were_not_drawn_from_biases(change, rule, widths):
    assert one_pass(P, lambda noise: drawn(noise, Q, widths), rule, 3).deviation < EXACT
    assert one_pass(P, lambda noise: with_probs(drawn(noise, Q, widths), change), rule, 3).deviation > CLEARLY


def test_coupled_does_not_even_look_at_q():
    assert one_pass(P, lambda noise: with_probs(drawn(noise, Q, deep(1, 1)), flattened), "coupled", 3).deviation < EXACT


def test_siblings_drawn_without_replacement_under_the_law_with_replacement_bias():
    """The second of two children must carry q without the first."""

    def propose(noise):
        return with_probs(drawn(noise, Q4, deep(2)), lambda probs_nV: probs_nV[:1].expand(2, -1))

    assert one_pass(P4, lambda noise: drawn(noise, Q4, deep(2)), "rejection", 2).deviation < EXACT
    assert one_pass(P4, propose, "rejection", 2).deviation > CLEARLY


@pytest.mark.parametrize("widths", [deep(1), deep(2), deep(1, 1)], ids=["one", "two", "chain"])
def test_likeliest_tokens_presented_as_drawn_bias(widths):
    """Greedy children with the softmax they were picked by: they were not sampled from it."""

    def propose(noise, probs):
        draft = chosen(Q, widths)
        rows = [Q(path[:-1]) for path in draft.paths()]
        return Draft(draft.tokens, draft.parents, torch.stack(rows) if probs else None)

    assert one_pass(P, lambda noise: propose(noise, False), "rejection", 3).deviation < EXACT
    assert one_pass(P, lambda noise: propose(noise, True), "rejection", 3).deviation > CLEARLY


# A number used twice.


class ResidualSharesDraftsNumber(BranchingNoise):
    def choose(self, depth, weights_V):
        return self.branch.quantile((Lane.DRAFT, depth, 0), weights_V)


class AcceptSharesDraftsNumber(BranchingNoise):
    def accept(self, depth, sibling, probability):
        return self.branch.below((Lane.DRAFT, depth, 0), probability)


class AcceptSharesResidualsNumber(BranchingNoise):
    def choose(self, depth, weights_V):
        return self.branch.quantile((Lane.ACCEPT, depth, 0), weights_V)


@pytest.mark.parametrize("noise", [ResidualSharesDraftsNumber, AcceptSharesDraftsNumber, AcceptSharesResidualsNumber])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_lanes_that_share_a_number_bias(rule, noise):
    for widths, length in ((deep(1), 2), (deep(1, 1), 3)):
        assert one_pass(P4, lambda chance: drawn(chance, Q4, widths), rule, length).deviation < EXACT  # noqa: B023
        result = one_pass(P4, lambda chance: drawn(chance, Q4, widths), rule, length, noise)  # noqa: B023
        first = result.law.reshape(4, -1).sum(1)
        assert np.abs(first - P4(()).numpy()).max() > CLEARLY


class RealResidualInDraftsLane(SeededNoise):
    def choose(self, depth, weights_V):
        return self.draw(depth, weights_V)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_lanes_of_the_real_noise_that_share_a_number_bias(rule):
    for widths in (deep(1), deep(1, 1)):
        assert many_passes(P4, Q4, rule, widths, 3 if widths((0,)) else 2).deviation < EXACT
        assert many_passes(P4, Q4, rule, widths, 3 if widths((0,)) else 2, RealResidualInDraftsLane).deviation > CLEARLY


class KeyedByPlace(SeededNoise):
    """Coins that belong to a place in the text, not to a pass: a rejected tail's coins come back in the next pass."""

    def accept(self, depth, sibling, probability):
        return SeededNoise(self.seed, self.position + depth).accept(0, sibling, probability)

    def draw(self, depth, q_V, sibling=0):
        return SeededNoise(self.seed, self.position + depth).draw(0, q_V, 0)


def test_coins_met_again_in_the_next_pass_bias_block():
    """``rejection`` never looks beyond the first failure and is immune; ``block`` looks at the whole chain."""
    p, q, widths = constant(0.5, 0.3, 0.2), constant(0.1, 0.4, 0.5), deep(1, 1)
    assert many_passes(p, q, "rejection", widths, 3, KeyedByPlace).deviation < EXACT
    assert many_passes(p, q, "block", widths, 3, KeyedByPlace).deviation > CLEARLY
    assert many_passes(p, q, "block", widths, 3).deviation < EXACT


# A length chosen by what was drawn.


def test_dropping_a_drawn_token_by_its_value_biases():
    """The counter-example of DSpark, appendix A: B is dropped when drawn, and A comes out 85 times in 100."""
    p, q = constant(0.7, 0.3), constant(0.5, 0.5)

    def propose(noise):
        draft = drawn(noise, q, deep(1))
        return EMPTY if draft.tokens == (1,) else draft

    result = one_pass(p, propose, "rejection", 2)
    assert result.law.sum(axis=1)[0] == pytest.approx(0.85, abs=EXACT)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_cutting_at_an_improbable_drawn_token_biases(rule):
    """A `p_min` on the drawn token's own probability; the same cut *before* the draw is exact."""

    def cut_after_drawing(noise):
        draft = drawn(noise, Q, deep(1, 1, 1))
        keep = next((i for i, token in enumerate(draft.tokens) if draft.probs[i][token] < 0.4), len(draft))
        return draft.first(keep)

    def cut_before_drawing(noise):
        return drawn(noise, Q, lambda path: int(len(path) < 3 and float(Q(path).max()) >= 0.4))

    assert one_pass(P, cut_before_drawing, rule, 4).deviation < EXACT
    assert one_pass(P, cut_after_drawing, rule, 4).deviation > CLEARLY


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chosen_tokens_may_be_dropped_for_any_reason(rule):
    """Point masses and ``coupled`` are immune: the same cut as above, without a law or without its use."""

    def propose(_noise):
        draft = chosen(Q, deep(1, 1, 1))
        return draft.first(next((i for i, path in enumerate(draft.paths()) if Q(path[:-1])[path[-1]] < 0.5), 3))

    def propose_drawn(noise):
        draft = drawn(noise, Q, deep(1, 1, 1))
        return EMPTY if draft.tokens[0] == 0 else draft

    assert one_pass(P, propose, rule, 4).deviation < EXACT
    assert one_pass(P, propose_drawn, "coupled", 4).deviation < EXACT
    assert one_pass(P, propose_drawn, rule, 4).deviation > CLEARLY


# Block rules that look right.


def block_of(last_success):
    """The first token's law under p = (.7, .3), q = (.4, .6), K = 3, from a million runs of a block rule in numpy.

    last_success(ratios, weights, chances, uniforms): bool [runs, K], which positions succeed; the last one counts.
    """
    rng, runs, num_drafted = np.random.default_rng(0), 1_000_000, 3
    p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])
    drafted = (rng.random((runs, num_drafted)) >= q[0]).astype(int)
    ratios = p[drafted] / q[drafted]
    weights = np.ones((runs, num_drafted + 1))
    for i in range(num_drafted):
        weights[:, i + 1] = np.minimum(1, weights[:, i] * ratios[:, i])
    masses = np.maximum(weights[:, 1:, None] * p - q, 0).sum(2)
    rests = masses + 1 - weights[:, 1:]
    chances = np.divide(masses, rests, out=np.ones_like(masses), where=rests > 0)
    chances[:, -1] = weights[:, -1]
    succeeds = last_success(ratios, weights[:, 1:], chances, rng.random((runs, num_drafted)))
    # The residual after no success is certain to be token 0: max(p - q, 0) = (.3, 0).
    return float(np.where(succeeds.any(1), drafted[:, 0] == 0, True).mean())


@pytest.mark.parametrize(
    ("name", "rule", "law_of_0"),
    [
        ("the paper's", lambda r, w, h, u: u <= h, 0.700),
        ("products of ratios against products of uniforms",
         lambda r, w, h, u: np.cumprod(u, 1) <= np.cumprod(np.minimum(1, r), 1), 0.488),
        ("running weights against products of uniforms", lambda r, w, h, u: np.cumprod(u, 1) <= w, 0.458),
        ("running weights against independent uniforms", lambda r, w, h, u: u <= w, 0.505),
    ],
)  # fmt: skip
def test_three_block_rules_that_look_right_are_far_off(name, rule, law_of_0):
    assert block_of(rule) == pytest.approx(law_of_0, abs=0.003), name


def weights_of(draft, p_NV):
    weights = [1.0]
    for i, token in enumerate(draft.tokens):
        weights.append(min(1.0, weights[-1] * float(p_NV[i, token] / draft.probs[i, token])))
    return weights


def block_without_chances(draft, p_NV, noise):
    """The third of the rules above: the running weight itself is taken for the chance."""
    weights, num_accepted = weights_of(draft, p_NV), 0
    for i in range(1, len(draft) + 1):
        if noise.accept(i - 1, 0, weights[i]):
            num_accepted = i
    return block_end(draft, p_NV, noise, weights, num_accepted)


def block_that_stops_at_a_failure(draft, p_NV, noise):
    """The paper's chances, but the first failure ends the walk."""
    weights, num_accepted = weights_of(draft, p_NV), 0
    for i in range(1, len(draft) + 1):
        mass = float((weights[i] * p_NV[i] - draft.probs[i]).clamp(min=0).sum()) if i < len(draft) else weights[i]
        rest = 1 - weights[i] if i < len(draft) else 1 - mass
        if not noise.accept(i - 1, 0, mass / (mass + rest) if mass + rest > 0 else 1.0):
            break
        num_accepted = i
    return block_end(draft, p_NV, noise, weights, num_accepted)


def block_end(draft, p_NV, noise, weights, num_accepted):
    left_V = p_NV[num_accepted]
    if num_accepted < len(draft):
        scaled_V = (weights[num_accepted] * left_V - draft.probs[num_accepted]).clamp(min=0)
        left_V = scaled_V if bool(scaled_V.any()) else left_V
    return Verdict(tuple(range(num_accepted)), noise.choose(num_accepted, left_V))


def block_with_plain_residual(draft, p_NV, noise):
    """The right length, then the residual of ``rejection``: max(p - q, 0) without the weight before p."""
    num_accepted = len(verify(draft, p_NV, "block", noise).path)
    return block_end(draft, p_NV, noise, [1.0] * (len(draft) + 1), num_accepted)


@pytest.mark.parametrize("rule", [block_without_chances, block_that_stops_at_a_failure, block_with_plain_residual])
def test_block_variants_fail_the_exact_check(rule):
    assert one_pass(P4, lambda noise: drawn(noise, Q4, deep(1, 1, 1)), "block", 4).deviation < EXACT
    assert one_pass(P4, lambda noise: drawn(noise, Q4, deep(1, 1, 1)), rule, 4).deviation > 0.002


def test_the_third_rule_is_as_far_off_by_enumeration_as_by_chance():
    p, q = constant(0.7, 0.3), constant(0.4, 0.6)
    result = one_pass(p, lambda noise: drawn(noise, q, deep(1, 1, 1)), block_without_chances, 4)
    assert result.law.sum(axis=(1, 2, 3))[0] == pytest.approx(0.5063125, abs=EXACT)


# Rules for other purposes.


def test_accepting_what_is_merely_typical_biases():
    """Medusa's typical acceptance: whatever the target finds likely enough passes, so the drafter decides."""

    def typical(draft, p_NV, noise):
        p_V, token = p_NV[0], draft.tokens[0]
        floor = min(0.09, 0.3 * float(torch.exp((p_V * p_V.log()).sum())))
        return Verdict((0,), noise.choose(1, p_NV[1])) if p_V[token] > floor else Verdict((), noise.choose(0, p_V))

    p, q = constant(0.5, 0.3, 0.2), constant(0.1, 0.1, 0.8)
    result = one_pass(p, lambda noise: drawn(noise, q, deep(1)), typical, 2)
    assert np.allclose(result.law.sum(axis=1), q(()))
    assert result.deviation > CLEARLY


def test_the_enumerator_agrees_with_the_numbers_it_stands_for():
    """The one thing above that is not code under test: intervals narrow as comparisons with real numbers would."""
    q_V, left_V = (torch.tensor(law, dtype=torch.float64) for law in ([0.2, 0.5, 0.3], [0.6, 0.1, 0.3]))
    chance = 0.4

    def run(branch):
        noise = ResidualSharesDraftsNumber(branch)
        token = noise.draw(0, q_V, 0)
        return (token, -1) if noise.accept(0, 0, chance) else (token, noise.choose(0, left_V))

    law = {}
    for probability, what in branches(run):
        law[what] = law.get(what, 0.0) + probability
    u, v = (np.array([uniform(seed, 0, lane) for seed in range(20_000)]) for lane in (Lane.DRAFT, Lane.ACCEPT))
    tokens = np.searchsorted([0.2, 0.7], u, side="right")
    ends = np.where(v < chance, -1, np.searchsorted([0.6, 0.7], u, side="right"))
    assert set(law) == set(zip(tokens.tolist(), ends.tolist(), strict=True))
    for (token, end), probability in law.items():
        assert np.mean((tokens == token) & (ends == end)) == pytest.approx(probability, abs=0.015)
