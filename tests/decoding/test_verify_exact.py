"""The promise of the package, by enumeration: whatever the draft, what comes out has exactly the target's joint law.

Nothing is sampled here: every branch of chance is run once (enumeration.py). Wrong rules that must fail the same check
are in test_verify_controls.py, the real random numbers in test_verify_chi_square.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from pilotfish.decoding.draft import EMPTY, chain
from pilotfish.decoding.noise import SeededNoise, race
from pilotfish.decoding.theory import alpha_of, expected_tokens
from pilotfish.decoding.verify import match, verify

from .enumeration import (
    BranchingNoise,
    after,
    branches,
    chosen,
    constant,
    contexts,
    deep,
    drawn,
    emitted,
    many_passes,
    one_pass,
    tables,
    target_rows,
)

EXACT = 1e-12
RULES = ("rejection", "block", "coupled")
TREE_RULES = ("rejection", "coupled")
# (vocabulary, drafted tokens)
CHAINS = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (3, 4), (4, 2), (4, 3), (4, 4), (5, 1), (5, 2), (5, 3)]


def wide_where(path):
    """Mixed widths, decided by what stands before a draw, never by what is drawn: 2, 1 or no children."""
    return {1: path[-1], 2: path[-1] % 2, 3: 0}[len(path)] if path else 2


# name: (vocabulary, widths, tokens that may come out)
TREES = {
    "two leaves": (5, deep(2), 2),
    "all of the vocabulary": (4, deep(4), 2),
    "two and one": (4, deep(2, 1), 3),
    "two and two": (3, deep(2, 2), 3),
    "one and three": (4, deep(1, 3), 3),
    "one, two, one": (3, deep(1, 2, 1), 4),
    "mixed": (3, wide_where, 4),
}


def pair(seed, vocab, length, holes=0.0):
    """An unrelated target and drafter, both moderately peaky."""
    p = tables(seed, vocab, length, sharpness=1.5, holes=holes)
    return p, tables(seed + 1000, vocab, length, sharpness=1.5, holes=holes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "num_drafted"), CHAINS)
def test_a_drawn_chain_is_exact(rule, vocab, num_drafted):
    p, q = pair(vocab * 10 + num_drafted, vocab, num_drafted + 1)
    result = one_pass(p, lambda noise: drawn(noise, q, deep(*[1] * num_drafted)), rule, num_drafted + 1)
    assert result.deviation < EXACT
    assert result.accepted > 0.01  # the law would be the target's too if nothing were ever accepted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_chain_is_exact_where_laws_have_holes(rule, seed):
    """q = 0 where p is not, p = 0 where q is not, sometimes no token in common at all."""
    p, q = pair(seed, 4, 3, holes=0.5)
    assert one_pass(p, lambda noise: drawn(noise, q, deep(1, 1)), rule, 3).deviation < EXACT


@pytest.mark.parametrize("name", TREES)
def test_a_drawn_tree_is_exact(name):
    vocab, widths, length = TREES[name]
    p, q = pair(len(name), vocab, length)
    result = one_pass(p, lambda noise: drawn(noise, q, widths), "rejection", length)
    assert result.deviation < EXACT
    assert result.accepted > 0.1


def test_a_drawn_tree_is_exact_for_coupled():
    p, q = pair(11, 3, 3)
    result = one_pass(p, lambda noise: drawn(noise, q, deep(2, 1)), "coupled", 3)
    assert result.deviation < EXACT
    assert result.accepted > 0.1


@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_tree_is_exact_where_laws_have_holes(seed):
    """Some nodes get fewer children than wanted because q has no more tokens to draw."""
    p, q = pair(seed, 4, 3, holes=0.5)
    assert one_pass(p, lambda noise: drawn(noise, q, deep(3, 2)), "rejection", 3).deviation < EXACT


def test_the_order_of_nodes_does_not_matter_only_that_of_siblings():
    p, q = pair(3, 3, 3)
    results = [
        one_pass(p, lambda noise, how=how: drawn(noise, q, deep(2, 2), depth_first=how), "rejection", 3)
        for how in (False, True)
    ]
    assert results[0].deviation < EXACT
    assert results[1].deviation < EXACT
    assert math.isclose(results[0].accepted, results[1].accepted, abs_tol=EXACT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "num_drafted"), [(2, 4), (3, 3), (5, 2)])
def test_a_chosen_chain_is_exact(rule, vocab, num_drafted):
    p, q = pair(vocab, vocab, num_drafted + 1)
    result = one_pass(p, lambda _noise: chosen(q, deep(*[1] * num_drafted)), rule, num_drafted + 1)
    assert result.deviation < EXACT
    assert result.accepted > 0


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("holes", [0.0, 0.4])
def test_a_chosen_tree_is_exact(rule, name, holes):
    vocab, widths, length = TREES[name]
    p, q = pair(len(name), vocab, length, holes)
    result = one_pass(p, lambda _noise: chosen(q, widths), rule, length)
    assert result.deviation < EXACT
    assert result.accepted > 0 or holes


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_draft_is_plain_decoding(rule):
    p, _ = pair(1, 5, 1)
    outcomes = {token: chance for chance, token in branches(
        lambda branch: emitted(EMPTY, verify(EMPTY, target_rows(p, EMPTY), rule, BranchingNoise(branch))))}  # fmt: skip
    assert np.allclose([outcomes[(token,)] for token in range(5)], p(()), atol=EXACT, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_where_to_stop_may_depend_on_everything_before_the_next_draw(rule):
    """A drafter may stop when unsure, or after an end of text it drew itself: the next token is not drawn yet."""
    p, q = pair(5, 3, 4)

    def stop_when_unsure(path):
        return int(len(path) < 3 and float(q(path).max()) > 0.55)

    def stop_after_token_0(path):
        return int(len(path) < 3 and 0 not in path)

    for widths in (stop_when_unsure, stop_after_token_0):
        assert len({widths(path) for path in contexts(3, 2)}) == 2, "it sometimes stops and sometimes does not"
        assert one_pass(p, lambda noise, widths=widths: drawn(noise, q, widths), rule, 4).deviation < EXACT


@pytest.mark.parametrize("num_kept", range(5))
def test_a_cut_by_position_is_exact(num_kept):
    p, q = pair(6, 3, 4)
    assert one_pass(p, lambda noise: drawn(noise, q, deep(2, 1, 1)).first(num_kept), "rejection", 4).deviation < EXACT
    assert one_pass(p, lambda noise: drawn(noise, q, deep(1, 1, 1)).first(num_kept), "block", 4).deviation < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("num_drafted", "length"), [(1, 3), (2, 3), (2, 4), (3, 4)])
def test_pass_after_pass_is_exact_under_the_keys_of_the_real_noise(rule, num_drafted, length):
    """A number that one pass looked at and a later one met again would be found here."""
    widths = deep(*[1] * num_drafted)
    assert many_passes(*pair(num_drafted, 2, length), rule, widths, length).deviation < EXACT
    assert many_passes(constant(0.7, 0.3), constant(0.4, 0.6), rule, widths, length).deviation < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_pass_after_pass_is_exact_where_the_residual_is_a_choice(rule):
    """With two tokens it never is, and a residual drawn by a number that was used before would go unnoticed."""
    p, q = constant(0.45, 0.35, 0.2), constant(0.1, 0.2, 0.7)
    assert many_passes(p, q, rule, deep(1, 1), 3).deviation < EXACT


def test_pass_after_pass_is_exact_for_trees():
    assert many_passes(*pair(12, 3, 3), "rejection", deep(2, 1), 3).deviation < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_float32_laws_are_exact_to_float32(rule):
    p, q = pair(8, 3, 4)
    p32, q32 = (lambda path, law=law: law(path).float() for law in (p, q))
    result = one_pass(p32, lambda noise: drawn(noise, q32, deep(1, 1, 1)), rule, 4)
    assert result.deviation < 3e-7


# How many are accepted.


def test_block_never_accepts_fewer_and_often_more():
    gains = []
    for seed in range(30):
        vocab, num_drafted = (2, 3) if seed % 2 else (3, 2)
        p, q = pair(seed, vocab, num_drafted + 1, holes=0.3 if seed % 3 == 0 else 0.0)
        accepted = [
            one_pass(p, lambda noise: drawn(noise, q, deep(*[1] * num_drafted)), rule, num_drafted + 1).accepted  # noqa: B023
            for rule in ("block", "rejection")
        ]
        gains.append(accepted[0] - accepted[1])
    assert min(gains) > -EXACT
    assert max(gains) > 0.05
    assert sum(gain > 1e-6 for gain in gains) > 20


def test_block_is_rejection_for_one_token():
    for seed in range(5):
        p, q = pair(seed, 5, 2, holes=0.2)
        results = [one_pass(p, lambda noise: drawn(noise, q, deep(1)), rule, 2) for rule in ("block", "rejection")]  # noqa: B023
        assert math.isclose(results[0].accepted, results[1].accepted, abs_tol=EXACT)


def test_block_is_rejection_for_chosen_chains():
    """A point mass leaves nothing to gain: the joint ratio is p itself, never above 1."""
    p, q = pair(9, 3, 4)
    results = [one_pass(p, lambda _noise: chosen(q, deep(1, 1, 1)), rule, 4) for rule in ("block", "rejection")]
    assert math.isclose(results[0].accepted, results[1].accepted, abs_tol=EXACT)


@pytest.mark.parametrize("seed", range(4))
def test_accepted_tokens_of_a_chain_are_what_the_papers_say(seed):
    """Rejection: each prefix is reached with min(p, q) of its last token. Block: sum of q(x^i) w_i (its Theorem 1)."""
    vocab, num_drafted = 3, 3
    p, q = pair(seed, vocab, num_drafted + 1)
    rejection = block = 0.0
    for tokens in itertools.chain.from_iterable(itertools.product(range(vocab), repeat=n) for n in range(1, 4)):
        reached = drawn_with = weight = 1.0
        for i, token in enumerate(tokens):
            p_x, q_x = float(p(tokens[:i])[token]), float(q(tokens[:i])[token])
            reached *= min(p_x, q_x)
            drawn_with *= q_x
            weight = min(1.0, weight * p_x / q_x)
        rejection += reached
        block += drawn_with * weight
    for rule, expected in (("rejection", rejection), ("block", block)):
        result = one_pass(p, lambda noise: drawn(noise, q, deep(1, 1, 1)), rule, 4)
        assert math.isclose(result.accepted, expected, abs_tol=EXACT), rule


@pytest.mark.parametrize("num_drafted", [1, 2, 4])
def test_accepted_tokens_are_those_of_the_formula_where_every_prefix_is_alike(num_drafted):
    p, q = constant(0.5, 0.3, 0.2), constant(0.2, 0.3, 0.5)
    alpha = alpha_of(p(()), q(()))
    assert math.isclose(alpha, 0.7)
    result = one_pass(p, lambda noise: drawn(noise, q, deep(*[1] * num_drafted)), "rejection", num_drafted + 1)
    assert math.isclose(1 + result.accepted, expected_tokens(alpha, num_drafted), abs_tol=EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_siblings_help_and_stay_under_the_optimum(seed):
    """Any exact rule accepts at most min over sets H of 1 + p(H) - P(all drafted in H) (Strassen's theorem)."""
    vocab = 4
    p, q = pair(seed, vocab, 2)
    one, two = (one_pass(p, lambda noise, k=k: drawn(noise, q, deep(k)), "rejection", 2).accepted for k in (1, 2))
    inside = {}  # the set drafted -> its probability
    for chance, draft in branches(lambda branch: drawn(BranchingNoise(branch), q, deep(2))):
        inside[frozenset(draft.tokens)] = inside.get(frozenset(draft.tokens), 0.0) + chance
    subsets = itertools.chain.from_iterable(itertools.combinations(range(vocab), n) for n in range(vocab + 1))
    optimum = min(
        1 + float(p(())[list(subset)].sum()) - sum(chance for tokens, chance in inside.items() if tokens <= set(subset))
        for subset in subsets
    )
    assert one < two < optimum + EXACT


# Edges.


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_from_the_target_itself_is_always_accepted(rule):
    p, _ = pair(2, 3, 4, holes=0.3)
    result = one_pass(p, lambda noise: drawn(noise, p, deep(1, 1, 1)), rule, 4)
    assert result.deviation < EXACT
    assert math.isclose(result.accepted, 3, abs_tol=EXACT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafted", ["drawn", "chosen"])
def test_disjoint_supports_accept_nothing(rule, drafted):
    p, q = constant(0.6, 0.4, 0.0, 0.0), constant(0.0, 0.0, 0.5, 0.5)
    propose = (lambda noise: drawn(noise, q, deep(1, 1))) if drafted == "drawn" else (lambda _: chosen(q, deep(1, 1)))
    result = one_pass(p, propose, rule, 3)
    assert result.deviation < EXACT
    assert result.accepted == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_token_the_target_forbids_is_never_emitted(rule):
    """Not even where q gives it all its mass, nor after it, where a chain's rows say what they like."""
    p, q = constant(0.0, 0.5, 0.5), constant(0.9, 0.1, 0.0)
    result = one_pass(p, lambda noise: drawn(noise, q, deep(1, 1, 1)), rule, 4)
    assert result.deviation < EXACT
    assert result.law[0].sum() == result.law[:, 0].sum() == result.law[:, :, 0].sum() == 0


def test_when_every_child_is_rejected_what_is_left_is_exact():
    """The siblings cover q's whole support and part of p's."""
    p, q = constant(0.5, 0.3, 0.1, 0.1), constant(0.1, 0.2, 0.7, 0.0)
    assert one_pass(p, lambda noise: drawn(noise, q, deep(3)), "rejection", 2).deviation < EXACT
    assert one_pass(p, lambda _noise: chosen(q, deep(3)), "rejection", 2).deviation < EXACT
    assert one_pass(p, lambda _noise: chosen(q, deep(4)), "rejection", 2).deviation < EXACT


@pytest.mark.parametrize(
    ("rule", "widths"),
    [*((rule, deep(1, 1, 1)) for rule in RULES), *((rule, deep(3, 2, 1)) for rule in TREE_RULES)],
    ids=[*(f"{rule}-chain" for rule in RULES), *(f"{rule}-tree" for rule in TREE_RULES)],
)
def test_at_temperature_0_every_rule_is_the_longest_match(rule, widths):
    choices = {path: (sum(path) * 2 + len(path)) % 3 for path in contexts(3, 3)}
    p = {path: torch.eye(3, dtype=torch.float64)[token] for path, token in choices.items()}.__getitem__
    q = tables(4, 3, 4, sharpness=0.5)
    lengths = set()
    for how in range(20):
        draft = drawn(SeededNoise(how, 0), q, widths)
        paths = [(), *draft.paths()]
        p_NV = target_rows(p, draft)
        ((chance, verdict),) = branches(lambda branch: verify(draft, p_NV, rule, BranchingNoise(branch)))  # noqa: B023
        assert chance == 1
        assert verdict == match(draft, lambda row, _depth: choices[paths[row]])  # noqa: B023
        text = emitted(draft, verdict)
        assert all(token == choices[text[:i]] for i, token in enumerate(text))
        lengths.add(len(text))
    assert len(lengths) > 1


# Coupled: more than a law, a text.


def test_coupled_text_does_not_depend_on_the_draft():
    """Chains, trees, drawn, chosen, raced with the same noise or mere noise: the text is that of plain decoding."""
    order, vocab, length = 3, 4, 12
    p_of, q_of = pair(7, vocab, order + 1)

    def p(text):
        return p_of(text[-order:])

    def q(text):
        return q_of(text[-order:])

    def raced(seed, text):
        tokens = ()
        for _ in range(3):
            tokens += (race(seed, len(text) + len(tokens), q((*text, *tokens))),)
        return chain(tokens)

    drafters = {
        "chain": lambda seed, text: drawn(SeededNoise(seed, len(text)), after(q, text), deep(1, 1, 1)),
        "tree": lambda seed, text: drawn(SeededNoise(seed + 1, len(text)), after(q, text), deep(2, 2, 1)),
        "chosen": lambda _seed, text: chosen(after(q, text), deep(3, 1, 1)),
        "raced": raced,
    }
    num_accepted = dict.fromkeys(drafters, 0)
    for seed in range(25):
        plain = ()
        while len(plain) < length:
            plain += (race(seed, len(plain), p(plain)),)
        for name, propose in drafters.items():
            text = ()
            while len(text) < length:
                draft = propose(seed, text)
                verdict = verify(draft, target_rows(after(p, text), draft), "coupled", SeededNoise(seed, len(text)))
                num_accepted[name] += len(verdict.path)
                text += emitted(draft, verdict)
            assert text[:length] == plain, (seed, name)
    assert all(num_accepted.values())
    assert num_accepted["raced"] > num_accepted["chain"], "sharing the noise is what makes guesses good"
