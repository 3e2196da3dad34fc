"""Exact laws of whatever is left to chance: the code under test is run once per branch of positive probability.

It does not know the acceptance rules. The one trick: a uniform number is never drawn but only ever *narrowed*. Each
key (lane, position, index) owns an interval of [0, 1) that is all a branch knows about its number; a comparison or
an inverse CDF cuts that interval, and the branch's probability shrinks by the cut. So a number that is read twice, by
mistake or on purpose, is the same number both times, as it is in `SeededNoise`, and the law is exact all the same.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

import pilotfish.decoding.noise as noise_module
from pilotfish.decoding.draft import Draft
from pilotfish.decoding.noise import Lane, SeededNoise
from pilotfish.decoding.verify import Rule, Verdict, verify

T = TypeVar("T")
Tokens = tuple[int, ...]
Law = Callable[[Tokens], Tensor]  # the tokens so far -> [V]
Widths = Callable[[Tokens], int]  # the tokens of a path -> how many children it gets
Propose = Callable[["BranchingNoise"], Draft]
Judge = Callable[[Draft, Tensor, "BranchingNoise"], Verdict]


@dataclass
class Branch:
    """One branch of chance: a script of outcomes to replay, then the first outcome of every further decision."""

    script: Tokens
    taken: list[int] = field(default_factory=list)
    forks: list[Tokens] = field(default_factory=list)
    probability: float = 1.0
    intervals: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def split(self, key: Hashable, edges: Sequence[float]) -> int:
        """The cell of ``edges`` (from 0 to 1) that this key's number lies in."""
        low, high = self.intervals.get(key, (0.0, 1.0))
        cells = [(max(low, left), min(high, right)) for left, right in itertools.pairwise(edges)]
        # A cell this thin is a rounding error between two sums of the same numbers.
        open_cells = [i for i, (left, right) in enumerate(cells) if right - left > 1e-15]
        if len(self.taken) < len(self.script):
            cell = self.script[len(self.taken)]
        else:
            cell = open_cells[0]
            self.forks += [(*self.taken, other) for other in open_cells[1:]]
        self.taken.append(cell)
        self.intervals[key] = cells[cell]
        self.probability *= (cells[cell][1] - cells[cell][0]) / (high - low)
        return cell

    def below(self, key: Hashable, threshold: float) -> bool:
        return self.split(key, (0.0, min(max(threshold, 0.0), 1.0), 1.0)) == 0

    def quantile(self, key: Hashable, weights_V: Tensor) -> int:
        sums = list(itertools.accumulate(weights_V.double().tolist(), initial=0.0))
        assert sums[-1] > 0
        return self.split(key, [s / sums[-1] for s in sums[:-1]] + [1.0])


class BranchingNoise:
    """The `Noise` of one branch, and a drafter's draws; one number per (lane, depth, index)."""

    def __init__(self, branch: Branch):
        self.branch = branch

    def accept(self, depth: int, sibling: int, probability: float) -> bool:
        return self.branch.below((Lane.ACCEPT, depth, sibling), probability)

    def choose(self, depth: int, weights_V: Tensor) -> int:
        return self.branch.quantile((Lane.RESIDUAL, depth), weights_V)

    def race(self, depth: int, p_V: Tensor) -> int:
        """The winner's law is p; that the real race has this law is a statistical test (test_noise.py)."""
        return self.branch.quantile((Lane.RACE, depth), p_V)

    def draw(self, depth: int, q_V: Tensor, sibling: int = 0) -> int:
        return self.branch.quantile((Lane.DRAFT, depth, sibling), q_V)


def branches(run: Callable[[Branch], T]) -> Iterator[tuple[float, T]]:
    """(probability, result) of ``run`` for every branch; the probabilities add up to 1."""
    waiting: list[Tokens] = [()]
    while waiting:
        branch = Branch(waiting.pop())
        result = run(branch)
        yield branch.probability, result
        waiting += branch.forks


@contextmanager
def seeded_noise_on(branch: Branch) -> Iterator[None]:
    """Inside, `SeededNoise` reads its numbers from a branch, under the very keys it would hash."""

    @dataclass(frozen=True)
    class Number:
        key: Hashable

        def __lt__(self, threshold: float) -> bool:
            return branch.below(self.key, threshold)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_module, "uniform", lambda *key: Number(key))
        patch.setattr(noise_module, "invert_cdf", lambda weights_V, number: branch.quantile(number.key, weights_V))
        patch.setattr(noise_module, "race", lambda seed, position, p_V: branch.quantile((seed, position, "race"), p_V))
        yield


def tables(seed: int, vocab: int, length: int, *, sharpness: float = 1.0, holes: float = 0.0) -> Law:
    """A random law per context of fewer than ``length`` tokens, float64; a share ``holes`` of the entries is 0."""
    rng = np.random.default_rng(seed)
    laws: dict[Tokens, Tensor] = {}
    for context in contexts(vocab, length - 1):
        weights = rng.exponential(size=vocab) ** sharpness * (rng.random(vocab) >= holes)
        if not weights.any():
            weights[rng.integers(vocab)] = 1.0
        laws[context] = torch.from_numpy(weights / weights.sum())
    return laws.__getitem__


def constant(*probabilities: float) -> Law:
    """The same law after every context."""
    law_V = torch.tensor(probabilities, dtype=torch.float64)
    return lambda _context: law_V


def contexts(vocab: int, most: int) -> Iterable[Tokens]:
    for length in range(most + 1):
        yield from itertools.product(range(vocab), repeat=length)


def deep(*widths: int) -> Widths:
    """So many children for every node of depth 0 (the pending token), 1, ...; a chain of K is deep(*[1] * K)."""
    return lambda path: widths[len(path)] if len(path) < len(widths) else 0


def drawn(noise: BranchingNoise | SeededNoise, q: Law, widths: Widths, *, depth_first: bool = False) -> Draft:
    """A tree drawn from q; siblings without replacement, each with the law it was really drawn from."""
    tokens, parents, laws = list[int](), list[int](), list[Tensor]()
    num_drawn: dict[int, int] = defaultdict(int)  # per depth
    waiting: list[tuple[int, Tokens]] = [(-1, ())]
    while waiting:
        parent, path = waiting.pop(-1 if depth_first else 0)
        left_V = q(path).clone()
        for _ in range(widths(path)):
            if not left_V.any():
                break
            laws.append(left_V / left_V.sum())
            # Nodes of one depth must not share a number, whoever their parents are; in a chain the index is always 0.
            token = noise.draw(len(path), laws[-1], num_drawn[len(path)])
            num_drawn[len(path)] += 1
            left_V[token] = 0
            waiting.append((len(tokens), (*path, token)))
            tokens.append(token)
            parents.append(parent)
    return Draft(tuple(tokens), tuple(parents), torch.stack(laws) if laws else None)


def chosen(q: Law, widths: Widths) -> Draft:
    """The likeliest tokens of q at each node: a draft that was not drawn."""
    tokens, parents = list[int](), list[int]()
    waiting: list[tuple[int, Tokens]] = [(-1, ())]
    while waiting:
        parent, path = waiting.pop(0)
        for token in q(path).argsort(descending=True, stable=True)[: widths(path)].tolist():
            waiting.append((len(tokens), (*path, token)))
            tokens.append(token)
            parents.append(parent)
    return Draft(tuple(tokens), tuple(parents))


def after(law: Law, context: Sequence[int]) -> Law:
    """The law from a later place in the text on."""
    return lambda path: law((*context, *path))


def target_rows(p: Law, draft: Draft) -> Tensor:
    """[len(draft) + 1, V]: what the target says after the pending token and after each node."""
    return torch.stack([p(()), *map(p, draft.paths())])


def emitted(draft: Draft, verdict: Verdict) -> Tokens:
    """The tokens of a verdict; its path must lead from the root down."""
    assert [draft.parents[node] for node in verdict.path] == [-1, *verdict.path[:-1]][: len(verdict.path)]
    return (*(draft.tokens[node] for node in verdict.path), verdict.token)


def joint(p: Law, vocab: int, length: int, start: Tokens = ()) -> np.ndarray:
    """The target's own law of all texts of this length that begin with ``start``, given that: [V, ..., V]."""
    if len(start) == length:
        return np.ones(())
    rows = [joint(p, vocab, length, (*start, token)) for token in range(vocab)]
    return np.stack([weight * row for weight, row in zip(p(start).tolist(), rows, strict=True)])


@dataclass
class Outcome:
    """law: of the first ``length`` tokens, [V, ..., V]; accepted: expected number of accepted drafted tokens."""

    law: np.ndarray
    accepted: float
    deviation: float  # largest difference from the target's own joint law


def outcome(run: Callable[[Branch], tuple[Tokens, int]], p: Law, length: int) -> Outcome:
    """Enumerate ``run``, which returns tokens and how many were drafted; the target itself completes shorter ones."""
    vocab = len(p(()))
    reached: dict[Tokens, float] = defaultdict(float)
    accepted = 0.0
    for probability, (tokens, num_accepted) in branches(run):
        reached[tokens] += probability
        accepted += probability * num_accepted
    assert abs(sum(reached.values()) - 1) < 1e-12
    law = np.zeros((vocab,) * length)
    for tokens, probability in reached.items():
        law[tokens] += probability * joint(p, vocab, length, tokens)
    return Outcome(law, accepted, float(np.abs(law - joint(p, vocab, length)).max()))


def one_pass(
    p: Law,
    propose: Propose,
    judge: Rule | Judge,
    length: int,
    noise: Callable[[Branch], BranchingNoise] = BranchingNoise,
) -> Outcome:
    """What one draft and one verdict make of the target."""

    def run(branch: Branch) -> tuple[Tokens, int]:
        chance = noise(branch)
        draft = propose(chance)
        p_NV = target_rows(p, draft)
        verdict = verify(draft, p_NV, judge, chance) if isinstance(judge, str) else judge(draft, p_NV, chance)
        return emitted(draft, verdict), len(verdict.path)

    return outcome(run, p, length)


def many_passes(
    p: Law, q: Law, rule: Rule, widths: Widths, length: int, noise_of_pass: type[SeededNoise] = SeededNoise
) -> Outcome:
    """What decoding pass after pass makes of the target, with drafts from q and the keys of the real `SeededNoise`."""

    def run(branch: Branch) -> tuple[Tokens, int]:
        tokens: Tokens = ()
        num_accepted = 0
        with seeded_noise_on(branch):
            while len(tokens) < length:
                noise = noise_of_pass(0, len(tokens))
                room = length - len(tokens) - 1  # the last token is the target's
                draft = drawn(noise, after(q, tokens), lambda path, room=room: widths(path) if len(path) < room else 0)
                verdict = verify(draft, target_rows(after(p, tokens), draft), rule, noise)
                tokens += emitted(draft, verdict)
                num_accepted += len(verdict.path)
        return tokens, num_accepted

    return outcome(run, p, length)
