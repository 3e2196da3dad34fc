"""Hearing: what a verdict was based on, written down while it is reached: p, q, the coins, and the laws drawn from.

It does not know texts, nor who reads it. The one trick: all chance enters the rules through a `Noise`, so a noise that
listens (`Witness`) meets every coin and every draw, and the rules need not know that they are watched. Nothing here
decides anything: a hearing is made from a verdict, never the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..lazily import torch
from .draft import Draft
from .noise import SeededNoise, exponentials
from .verify import Rule, Verdict, own_probabilities

if TYPE_CHECKING:
    from torch import Tensor

NUM_TOP = 5  # ids of a law that are kept
Top = tuple[tuple[int, float], ...]  # ids and probabilities, the likeliest first
Kind = Literal["plain", "bonus", "residual", "choice"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A node that was looked at, in the order of looking. What its rule does not have is None.

    passed: under ``rejection`` and ``block``, whether u < threshold; else whether it is what the target said.
    left: under ``rejection``, the token's share of what its siblings left of p (p itself for the first); the threshold
        is left / q. weight: under ``block``, the joint ratio w of the chain down to here.
    u: the uniform, in [0, 1); None where p = 0, which needs no coin.
    noise, score: under ``coupled``, the token's exponential, and p over it; the highest score of all ids wins.
    """

    node: int
    passed: bool
    left: float | None = None
    weight: float | None = None
    threshold: float | None = None
    u: float | None = None
    noise: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The target's law p behind a token on the accepted path. after: that node; -1 is the pending token.

    choice: what the target says there, if that is fixed without a coin (temperature 0, and ``coupled``, where score is
    its p over its noise).
    """

    after: int
    top: Top
    choice: int | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Last:
    """The one token after the accepted path.

    kind: ``bonus``, all guesses on the way were kept; ``residual``, drawn from what the rejected ones left of p;
        ``choice``, the target's own, which was not among the guesses; ``plain``, there were none.
    p: its probability under the target's law. top: of the law that it was drawn from.
    u, low, high: if it was drawn, the uniform, and the token's slice of [0, 1) with the ids in order.
    """

    token: int
    kind: Kind
    p: float
    top: Top
    u: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Hearing:
    """One request in one pass.

    rule: which decided; ``greedy`` at temperature 0. seed, position: of the noise; position is the place in the text of
        the first token that this pass gives. p, q: per node, of its token behind its parent; q is 1 for a token that
        was chosen, not drawn. At temperature 0, p is the law at temperature 1: it is shown, and decides nothing.
    path: the accepted nodes, before the commit walk, which may end the text inside it.
    """

    rule: Rule | Literal["greedy"]
    seed: int
    position: int
    drawn: bool
    p: tuple[float, ...]
    q: tuple[float, ...]
    trials: tuple[Trial, ...]
    rows: tuple[Row, ...]
    last: Last
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Drawn:
    u: float
    low: float
    high: float
    top: Top


class Witness(SeededNoise):
    """The noise itself, and what it was asked. coins: {(depth, sibling): (threshold, u, whether it passed)}."""

    __slots__ = ("choices", "coins", "drawn")

    def __init__(self, seed: int, position: int):
        super().__init__(seed, position)
        self.coins: dict[tuple[int, int], tuple[float, float, bool]] = {}
        self.drawn: _Drawn | None = None
        self.choices: list[int] = []

    def accept(self, depth: int, sibling: int, probability: float) -> bool:
        passed = super().accept(depth, sibling, probability)
        self.coins[depth, sibling] = (probability, self.coin(depth, sibling), passed)
        return passed

    def choose(self, depth: int, weights_V: Tensor) -> int:
        token = super().choose(depth, weights_V)
        cdf_V = torch.cumsum(weights_V, 0, dtype=torch.float64)
        total = float(cdf_V[-1])
        low = float(cdf_V[token - 1]) / total if token else 0.0
        self.drawn = _Drawn(self.quantile(depth), low, float(cdf_V[token]) / total, top_of(weights_V / total))
        return token

    def race(self, depth: int, p_V: Tensor) -> int:
        self.choices.append(super().race(depth, p_V))
        return self.choices[-1]


def hear(witness: Witness, rule: Rule, draft: Draft, p_NV: Tensor, verdict: Verdict) -> Hearing:
    """What the rule based its verdict on. p_NV: [len(draft) + 1, V], as given to it with this witness for its noise."""
    p, q = own_probabilities(draft, p_NV)
    drawn = witness.drawn
    if rule == "coupled":
        trials, rows = _race_trials(witness, draft, p_NV, p, verdict), _rows(p_NV, verdict, witness.choices, witness)
    else:
        trials = _block_trials(witness, p, q) if rule == "block" else _rejection_trials(witness, draft, q, verdict)
        rows = _rows(p_NV, verdict)
        assert drawn is not None, "each of these rules ends with a draw"
    kind = _kind(draft, verdict, "choice" if rule == "coupled" else "residual")
    own = float(p_NV[_last_row(verdict), verdict.token])
    last = (
        Last(verdict.token, kind, own, rows[-1].top)
        if drawn is None
        else Last(verdict.token, kind, own, drawn.top, drawn.u, drawn.low, drawn.high)
    )
    is_drawn = draft.probs is not None
    return Hearing(rule, witness.seed, witness.position, is_drawn, tuple(p), tuple(q), trials, rows, last, verdict.path)


def hear_choices(
    seed: int, position: int, draft: Draft, logits_NV: Tensor, choices: Sequence[int], verdict: Verdict
) -> Hearing:
    """The same at temperature 0. logits_NV: as they were compared; choices: per row, what the target says."""
    p_NV = torch.softmax(logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float(), 1)
    p, q = own_probabilities(draft, p_NV)
    walked = [choices[row] for row in _walked(verdict)]
    trials = tuple(
        Trial(node, draft.tokens[node] == choice)
        for choice, children in zip(walked, _looked_at(draft, verdict), strict=True)
        for node in children
    )
    rows = _rows(p_NV, verdict, walked)
    own = float(p_NV[_last_row(verdict), verdict.token])
    last = Last(verdict.token, _kind(draft, verdict, "choice"), own, rows[-1].top)
    drawn = draft.probs is not None
    return Hearing("greedy", seed, position, drawn, tuple(p), tuple(q), trials, rows, last, verdict.path)


def top_of(p_V: Tensor) -> Top:
    """The likeliest ids that have any probability."""
    values, ids = p_V.topk(min(NUM_TOP, len(p_V)))
    return tuple((id, value) for id, value in zip(ids.tolist(), values.tolist(), strict=True) if value > 0)


def _walked(verdict: Verdict) -> list[int]:
    """Rows of the laws met on the way down, the pending token's first."""
    return [0, *(node + 1 for node in verdict.path)]


def _last_row(verdict: Verdict) -> int:
    return verdict.path[-1] + 1 if verdict.path else 0


def _looked_at(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """Per law met on the way, the nodes that were held against it: up to the one that passed, or all."""
    children, found = draft.children(), list[list[int]]()
    for parent, passed in zip([-1, *verdict.path], [*verdict.path, None], strict=True):
        own = children[parent]
        found.append(own if passed is None else own[: own.index(passed) + 1])
    return found


def _kind(draft: Draft, verdict: Verdict, otherwise: Kind) -> Kind:
    if len(draft) == 0:
        return "plain"
    return otherwise if draft.children()[verdict.path[-1] if verdict.path else -1] else "bonus"


def _rows(
    p_NV: Tensor, verdict: Verdict, choices: Sequence[int] = (), witness: Witness | None = None
) -> tuple[Row, ...]:
    rows = []
    for depth, row in enumerate(_walked(verdict)):
        choice = choices[depth] if choices else None
        score = None
        if witness is not None and choice is not None:
            _, score = _score(witness, depth, p_NV[row], choice)
        rows.append(Row(row - 1, top_of(p_NV[row]), choice, score))
    return tuple(rows)


def _score(witness: Witness, depth: int, p_V: Tensor, token: int) -> tuple[float, float]:
    """A token's exponential, and its p over that."""
    noise = float(exponentials(witness.seed, witness.position + depth, len(p_V))[token])
    return noise, float(p_V[token]) / noise


def _rejection_trials(witness: Witness, draft: Draft, q: Sequence[float], verdict: Verdict) -> tuple[Trial, ...]:
    trials = []
    for depth, nodes in enumerate(_looked_at(draft, verdict)):
        for sibling, node in enumerate(nodes):
            threshold, u, passed = witness.coins.get((depth, sibling), (0.0, None, False))
            left = threshold * q[node] if q[node] > 0 else None
            trials.append(Trial(node, passed, left=left, threshold=threshold, u=u))
    return tuple(trials)


def _block_trials(witness: Witness, p: Sequence[float], q: Sequence[float]) -> tuple[Trial, ...]:
    trials, weight = [], 1.0
    for node, (own_p, own_q) in enumerate(zip(p, q, strict=True)):
        weight = min(1.0, weight * (own_p / own_q if own_q > 0 else 1.0)) if own_p > 0 else 0.0
        threshold, u, passed = witness.coins[node, 0]
        trials.append(Trial(node, passed, weight=weight, threshold=threshold, u=u))
    return tuple(trials)


def _race_trials(
    witness: Witness, draft: Draft, p_NV: Tensor, p: Sequence[float], verdict: Verdict
) -> tuple[Trial, ...]:
    trials = []
    for depth, nodes in enumerate(_looked_at(draft, verdict)):
        for node in nodes:
            token = draft.tokens[node]
            noise, score = _score(witness, depth, p_NV[draft.parents[node] + 1], token)
            trials.append(Trial(node, token == witness.choices[depth], noise=noise, score=score))
    return tuple(trials)
