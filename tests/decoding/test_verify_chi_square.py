"""The promise again, with the real random numbers: chi-square against the target's law, per position and jointly.

Enumeration (test_verify_exact.py) cannot tell whether `SeededNoise` hands out independent numbers; this can. A narrow
vocabulary and a drafter of the opposite opinion make most tokens residuals, where shared lanes show; the same check
is put to such a lane and must explode. Seeds are fixed, so a p-value is a fact about this code, not a matter of luck.
"""

from bisect import bisect_right
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from pilotfish.decoding.draft import Draft, chain
from pilotfish.decoding.noise import Lane, SeededNoise, invert_cdf, race, uniform
from pilotfish.decoding.verify import verify

VOCAB, POSITION, UNLIKELY = 8, 5, 1e-4


def opposed_laws():
    """(p, q), float32 [V + 1, V]: a law after each token (V: after the prompt); what p likes, q dislikes."""
    rng = np.random.default_rng(11)
    p = rng.exponential(size=(VOCAB + 1, VOCAB)) + 0.15
    q = (1 / p) ** 1.2
    return tuple(torch.from_numpy(law / law.sum(1, keepdims=True)).float() for law in (p, q))


P, Q = opposed_laws()
START = VOCAB


def chi_square(counts, expected):
    """(statistic, degrees of freedom, p-value); cells that expect fewer than 5 are pooled. Both flat, same total."""
    counts, expected = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    assert abs(counts.sum() - expected.sum()) < 1e-3 * counts.sum()
    assert not counts[expected == 0].any()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic, len(counts) - 1, float(chi2.sf(statistic, len(counts) - 1))


def follows(name, counts, law):
    """Assert that counts are a sample of the law (need not be normalised)."""
    counts, law = np.asarray(counts, float), np.asarray(law, float)
    assert counts.sum() > 500, f"{name}: too few to tell"
    statistic, freedom, p_value = chi_square(counts, law / law.sum() * counts.sum())
    assert p_value > UNLIKELY, f"{name}: chi-square {statistic:.1f} for {freedom} degrees of freedom"


# The same numbers as SeededNoise.draw and .choose, through tables instead of tensors: 200,000 runs in seconds.


@cache
def sums_of(law_of_token, token, without=None):
    law_V = law_of_token(token).clone()
    if without is not None:
        law_V[without] = 0
        law_V /= law_V.sum()
    return torch.cumsum(law_V, 0, dtype=torch.float64).tolist(), law_V


def p_after(token):
    return P[token]


def q_after(token):
    return Q[token]


def drawn(seed, depth, node, context, without=None):
    """(token, its law): what `SeededNoise.draw` draws after the token ``context``."""
    sums, law_V = sums_of(q_after, context, without)
    return bisect_right(sums, uniform(seed, POSITION, Lane.DRAFT, depth << 16 | node) * sums[-1]), law_V


@cache
def chain_of(first, second):
    draft = chain((first, second), torch.stack([Q[START], Q[first]]))
    return draft, torch.stack([P[START], P[first], P[second]])


def drafted_chain(seed):
    first, _ = drawn(seed, 0, 0, START)
    second, _ = drawn(seed, 1, 0, first)
    return chain_of(first, second)


@cache
def tree_of(first, second, child):
    probs = torch.stack([Q[START], sums_of(q_after, START, first)[1], Q[first]])
    return Draft((first, second, child), (-1, -1, 0), probs), torch.stack([P[START], P[first], P[second], P[child]])


def drafted_tree(seed):
    """Two children of the pending token, without replacement, and a child of the first."""
    first, _ = drawn(seed, 0, 0, START)
    second, _ = drawn(seed, 0, 1, START, without=first)
    child, _ = drawn(seed, 1, 2, first)
    return tree_of(first, second, child)


@torch.inference_mode()  # a little faster, and there are 200,000 of them
def decode(num_runs, drafted, rule, noise_of=SeededNoise):
    """Counts of (first token, second token, number accepted); a second one the pass lacks is the next, plain pass's."""
    counts = Counter()
    for seed in range(num_runs):
        draft, p_NV = drafted(seed)
        verdict = verify(draft, p_NV, rule, noise_of(seed, POSITION))
        text = [*(draft.tokens[node] for node in verdict.path), verdict.token]
        if len(text) == 1:
            if rule == "coupled":
                text.append(race(seed, POSITION + 1, P[text[0]]))
            else:
                sums, _ = sums_of(p_after, text[0])
                text.append(bisect_right(sums, uniform(seed, POSITION + 1, Lane.RESIDUAL, 0) * sums[-1]))
        counts[(*text, *[None] * (3 - len(text)), verdict.path)] += 1
    return counts


def tally(counts, key, shape):
    table = np.zeros(shape)
    for what, times in counts.items():
        cell = key(*what)
        if cell is not None:
            table[cell] += times
    return table


def check_joint(name, counts):
    """The first token, the second, and the two together, against the target alone."""
    p, pair = P.double().numpy(), tally(counts, lambda x, y, *_: (x, y), (VOCAB, VOCAB))
    law = p[START][:, None] * p[:VOCAB]
    follows(f"{name}, first token", pair.sum(1), law.sum(1))
    follows(f"{name}, second token", pair.sum(0), law.sum(0))
    follows(f"{name}, first two tokens", pair, law)


def check_bonus(name, counts):
    """After a fully accepted chain the target's own token, given the drafted one before it."""
    pair = tally(counts, lambda _x, y, z, path: (y, z) if len(path) == 2 else None, (VOCAB, VOCAB))
    follows(f"{name}, bonus token", pair, pair.sum(1, keepdims=True) * P[:VOCAB].double().numpy())


def test_the_drafts_above_are_what_seeded_noise_draws():
    for seed in range(300):
        noise = SeededNoise(seed, POSITION)
        draft, _ = drafted_tree(seed)
        assert draft.tokens[0] == noise.draw(0, Q[START])
        assert draft.tokens[1] == noise.draw(0, draft.probs[1], 1)
        assert draft.tokens[2] == noise.draw(1, Q[draft.tokens[0]], 2)


def test_rejection_on_chains():
    counts = decode(200_000, drafted_chain, "rejection")
    check_joint("rejection", counts)
    check_bonus("rejection", counts)
    p, q = P[START].double().numpy(), Q[START].double().numpy()
    first = tally(counts, lambda x, _y, _z, path: (int(bool(path)), x), (2, VOCAB))
    assert first[0].sum() > 80_000, "most first tokens should be residuals"
    follows("accepted", first[1], np.minimum(p, q))
    follows("residual", first[0], np.maximum(p - q, 0))
    alpha = np.minimum(p, q).sum()
    follows("accepted or not", first.sum(1), [1 - alpha, alpha])


def test_rejection_on_trees():
    counts = decode(200_000, drafted_tree, "rejection")
    check_joint("tree", counts)
    # Per kind: accepted as the first sibling, as the second (its test is against what was left), as neither.
    p, q = P[START].double().numpy(), Q[START].double().numpy()
    left = np.maximum(p - q, 0)
    left /= left.sum()
    without = q[None, :] * (1 - np.eye(VOCAB)) / (1 - q[:, None])  # the second sibling's law, given the first
    tried = q * (1 - np.minimum(1, p / q))  # the first was this one, and rejected
    laws = [np.minimum(p, q), tried @ np.minimum(left, without), tried @ np.maximum(left - without, 0)]
    first = tally(counts, lambda x, _y, _z, path: (path[0] if path else 2, x), (3, VOCAB))
    assert np.isclose(sum(law.sum() for law in laws), 1)
    follows("kind and first token", first, np.stack(laws))
    for name, row, law in zip(("first sibling", "second sibling", "neither"), first, laws, strict=True):
        follows(name, row, law)


def test_block_on_chains():
    counts = decode(30_000, drafted_chain, "block")
    check_joint("block", counts)
    check_bonus("block", counts)


def test_coupled_on_chains():
    """The race is the target's own draw, so nothing is conditional on the draft; it is only guessed now and then."""
    counts = decode(15_000, drafted_chain, "coupled")
    check_joint("coupled", counts)
    first = tally(counts, lambda x, _y, _z, path: x if path else None, VOCAB)
    follows("coupled, guessed", first, P[START].double().numpy() * Q[START].double().numpy())


class ResidualInDraftsLane(SeededNoise):
    """The bug: the residual is chosen by the very number that drew the draft."""

    def choose(self, depth, weights_V):
        return invert_cdf(weights_V, uniform(self.seed, self.position, Lane.DRAFT, depth << 16))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_lane_shared_by_draft_and_residual_makes_the_statistic_explode(rule):
    counts = decode(10_000, drafted_chain, rule, ResidualInDraftsLane)
    first = tally(counts, lambda x, *_: x, VOCAB)
    statistic, freedom, p_value = chi_square(first, P[START].double().numpy() * first.sum())
    assert statistic > 15 * freedom
    assert p_value < 1e-20
    with pytest.raises(AssertionError, match="first token: chi-square"):
        check_joint("shared", counts)


def test_a_uniform_q_where_another_was_drawn_from_makes_the_statistic_explode():
    flat = torch.full((2, VOCAB), 1 / VOCAB)

    def drafted(seed):
        draft, p_NV = drafted_chain(seed)
        return Draft(draft.tokens, draft.parents, flat), p_NV

    first = tally(decode(5_000, drafted, "rejection"), lambda x, *_: x, VOCAB)
    assert chi_square(first, P[START].double().numpy() * first.sum())[2] < 1e-100


def test_the_chi_square_itself_is_calibrated():
    """Of 400 true samples, p-values below 0.05 are about 20; a bias of a fiftieth does not pass."""
    rng, law = np.random.default_rng(0), P[START].double().numpy()
    law = law / law.sum()
    p_values = [chi_square(sample, law * 5_000)[2] for sample in rng.multinomial(5_000, law, size=400)]
    assert 8 <= sum(p_value < 0.05 for p_value in p_values) <= 36
    biased = 0.98 * law + 0.02 * np.eye(VOCAB)[0]
    assert chi_square(rng.multinomial(200_000, biased), law * 200_000)[2] < 1e-20
