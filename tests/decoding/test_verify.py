"""Verify: single decisions, and where floating point could break a rule. Laws are in test_verify_exact.py."""

import pytest
import torch

from pilotfish.decoding.draft import EMPTY, Draft, chain
from pilotfish.decoding.noise import SeededNoise
from pilotfish.decoding.verify import Verdict, match, residual, verify


class Scripted:
    """Answers as told and keeps what it was asked; `choose` takes the likeliest."""

    def __init__(self, *answers):
        self.answers, self.asked, self.weights = list(answers), [], None

    def accept(self, depth, sibling, probability):
        self.asked.append((depth, sibling, pytest.approx(probability, rel=1e-6, abs=1e-12)))
        return self.answers.pop(0)

    def choose(self, depth, weights_V):
        self.weights = weights_V
        return int(weights_V.argmax())

    def race(self, depth, p_V):
        return int(p_V.argmax())


def rows(*laws):
    return torch.tensor(laws)


def test_acceptance_is_the_ratio():
    p_NV, q_nV = rows([0.2, 0.8], [0.6, 0.4], [0.5, 0.5]), rows([0.5, 0.5], [0.3, 0.7])
    noise = Scripted(True, True)
    assert verify(chain((0, 1), q_nV), p_NV, "rejection", noise) == Verdict((0, 1), 0)
    assert noise.asked == [(0, 0, 0.4), (1, 0, 4 / 7)]
    noise = Scripted(True, False)
    assert verify(chain((0, 1), q_nV), p_NV, "rejection", noise) == Verdict((0,), 0)
    assert noise.weights.tolist() == [1, 0]


def test_siblings_are_tested_against_what_is_left():
    """p = (.5, .3, .2); token 0 drawn from q, token 1 from q without 0: first .5/.8, then .5, 1/6, 1/3 against it."""
    p_NV = rows([0.3, 0.3, 0.4]).expand(3, 3)
    q_nV = rows([0.8, 0.1, 0.1], [0.0, 0.5, 0.5])
    noise = Scripted(False, False)
    verdict = verify(Draft((0, 1), (-1, -1), q_nV), p_NV, "rejection", noise)
    assert noise.asked == [(0, 0, 0.375), (0, 1, 0.8)]  # left: (0, .2, .3) / .5
    assert verdict == Verdict((), 2)


def test_chosen_siblings_lose_their_own_mass_only():
    p_NV = rows([0.5, 0.3, 0.2]).expand(3, 3)
    noise = Scripted(False, False)
    verdict = verify(Draft((0, 1), (-1, -1)), p_NV, "rejection", noise)
    assert noise.asked == [(0, 0, 0.5), (0, 1, 0.6)]
    assert verdict == Verdict((), 2)
    assert noise.weights.tolist() == pytest.approx([0, 0, 0.2])


def test_block_asks_for_every_position_and_the_last_success_counts():
    p_NV, q_nV = rows([0.7, 0.3], [0.7, 0.3], [0.7, 0.3], [0.5, 0.5]), rows([0.4, 0.6]).expand(3, 2)
    # Weights of (1, 0, 1): .5, .875, .4375. Masses of max(w p - q, 0): 0, .2125.
    noise = Scripted(False, True, False)
    assert verify(chain((1, 0, 1), q_nV), p_NV, "block", noise) == Verdict((0, 1), 0)
    assert noise.asked == [(0, 0, 0.0), (1, 0, 0.2125 / (0.2125 + 0.125)), (2, 0, 0.4375)]
    assert verify(chain((1, 0, 1), q_nV), p_NV, "block", Scripted(False, False, True)).path == (0, 1, 2)
    assert verify(chain((1, 0, 1), q_nV), p_NV, "block", Scripted(False, False, False)).path == ()


def test_a_token_of_probability_0_is_not_even_asked_about():
    p_NV, q_nV = rows([0.0, 1.0], [0.5, 0.5]), rows([1.0, 0.0])
    for draft in (chain((0,), q_nV), chain((0,))):
        assert verify(draft, p_NV, "rejection", Scripted()) == Verdict((), 1)
    noise = Scripted(False)
    assert verify(chain((0,), q_nV), p_NV, "block", noise) == Verdict((), 1)
    assert noise.asked == [(0, 0, 0.0)]


def test_a_residual_of_numerically_nothing_falls_back_to_p():
    """p = q: a rejection can only be a rounding error, and then any token of p will do, but none outside it."""
    law = rows([0.25, 0.0, 0.75])
    for rule in ("rejection", "block"):
        noise = Scripted(False)
        assert verify(chain((0,), law), law.expand(2, 3), rule, noise) == Verdict((), 2)
        assert noise.weights.tolist() == [0.25, 0.0, 0.75]
        noise = Scripted(False)
        assert verify(chain((0,)), rows([1.0, 0.0], [0.5, 0.5]), rule, noise) == Verdict((), 0)
    assert torch.equal(residual(law[0], law[0]), law[0])


def test_a_law_that_underflowed_to_0_at_its_own_token_is_no_division_by_zero():
    for rule in ("rejection", "block"):
        noise = Scripted(True)
        assert verify(chain((0,), rows([0.0, 1.0])), rows([0.5, 0.5], [0.0, 1.0]), rule, noise) == Verdict((0,), 1)
        assert noise.asked == [(0, 0, 1.0)]


def test_residual_is_normalised():
    left_V = residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7]))
    assert left_V.tolist() == pytest.approx([0.8, 0.2, 0.0])


def test_match_walks_down_while_guesses_are_right():
    tree = Draft((4, 5, 6, 7), (-1, -1, 1, 1))
    choices = {0: 5, 1: 9, 2: 7, 3: 8, 4: 3}  # row -> token: 0 is the pending token, i + 1 is node i
    seen = []

    def choose(row, depth):
        seen.append((row, depth))
        return choices[row]

    assert match(tree, choose) == Verdict((1, 3), 3)
    assert seen == [(0, 0), (2, 1), (4, 2)]
    assert match(EMPTY, lambda row, depth: 8) == Verdict((), 8)


def test_coupled_races_once_per_token_it_emits():
    p_NV = torch.eye(4)[[1, 2, 3]]
    assert verify(chain((1, 2)), p_NV, "coupled", Scripted()) == Verdict((0, 1), 3)
    assert verify(chain((1, 0)), p_NV, "coupled", Scripted()) == Verdict((0,), 2)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_laws_are_left_alone(rule):
    generator = torch.Generator().manual_seed(0)
    p_NV, q_nV = torch.rand(4, 6, generator=generator).softmax(1), torch.rand(3, 6, generator=generator).softmax(1)
    drafts = [chain((1, 2, 3), q_nV), chain((1, 2, 3))]
    if rule != "block":
        drafts += [Draft((1, 2, 3), (-1, -1, 0), q_nV), Draft((1, 2, 3), (-1, -1, 0))]
    before = p_NV.clone(), q_nV.clone()
    for draft in drafts:
        for seed in range(30):
            first = verify(draft, p_NV, rule, SeededNoise(seed, 0))
            assert verify(draft, p_NV, rule, SeededNoise(seed, 0)) == first
    assert torch.equal(before[0], p_NV)
    assert torch.equal(before[1], q_nV)


def test_block_refuses_trees_and_all_refuse_a_wrong_number_of_rows():
    with pytest.raises(AssertionError, match="chains"):
        verify(Draft((0, 1), (-1, -1)), torch.full((3, 2), 0.5), "block", Scripted())
    for rule in ("rejection", "block", "coupled"):
        with pytest.raises(AssertionError):
            verify(chain((0, 1)), torch.full((2, 2), 0.5), rule, Scripted())
