"""Growing a tree of guesses: what to look at next, and which nodes to hand out (EAGLE-2, Li et al. 2024, 2406.16858).

It does not know models. The one trick: a node's value is the log-probability of its path, which never rises on the way
down; so the best n nodes are a tree, and a node that is not among the best n now has no descendant that will be. Only
the others are looked at, which finds the same tree in fewer rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from ..decoding.draft import MAX_NODES, Draft


class Growth:
    """One tree in the making.

    limit: nodes wanted. width: most nodes looked at in one pass. depth: longest path. barren: tokens that end a text.

    Nodes are numbered in the order they were found. Those that were looked at have a second number, in that order.
    """

    def __init__(self, limit: int, width: int, depth: int, barren: Set[int] = frozenset()):
        self.limit, self.width, self.depth, self.barren = limit, width, depth, barren
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        self.frontier: list[int] = []  # nodes to look at next
        self.seen: dict[int, int] = {}  # node -> its number among those looked at
        self._ancestors: dict[int, int] = {}  # a seen node's ancestors and itself, as bits of those numbers
        self._level = 0

    def add(self, tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> None:
        """What may follow: a line per node of the frontier, or one line for the pending token at first."""
        found: list[int] = []
        for parent, line, values in zip(self.frontier or [-1], tokens, logprobs, strict=True):
            before = self.values[parent] if parent >= 0 else 0.0
            for token, value in zip(line, values, strict=True):
                found.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(parent)
                # Rounding may put a logarithm above 0, and a broken law gives a NaN: never better than its parent.
                self.values.append(before + min(value, 0.0) if value == value else -math.inf)
        self._level += 1
        self.frontier = self._fertile(found)
        for node in self.frontier:
            number, parent = len(self.seen), self.parents[node]
            self._ancestors[node] = (self._ancestors[parent] if parent >= 0 else 0) | 1 << number
            self.seen[node] = number

    @property
    def num_skipped(self) -> int:
        """How many nodes were looked at before the frontier."""
        return len(self.seen) - len(self.frontier)

    def ancestors(self) -> tuple[int, ...]:
        """Of each node in the frontier, as `pilotfish.paged.batch.Feed` wants them."""
        return tuple(self._ancestors[node] for node in self.frontier)

    def draft(self, kind: object = None) -> Draft:
        """The best nodes, the best first."""
        nodes = self._best()
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            tuple(self.tokens[node] for node in nodes), tuple(places[self.parents[node]] for node in nodes), kind=kind
        )

    def _best(self) -> list[int]:
        likely = [node for node, value in enumerate(self.values) if value > -math.inf]
        return sorted(likely, key=lambda node: (-self.values[node], node))[: self.limit]

    def _fertile(self, found: Sequence[int]) -> list[int]:
        """Of the nodes just found, those that a wanted node may follow, the best first."""
        if self._level >= self.depth:
            return []
        best, new = self._best()[: self.limit - 1], set(found)
        fertile = [node for node in best if node in new and self.tokens[node] not in self.barren]
        return fertile[: min(self.width, MAX_NODES - len(self.seen))]


def confidence(logprob: float) -> int:
    """How sure a first guess is, in four sorts: kinds of drafts, for their acceptance to be counted by."""
    return sum(logprob > bound for bound in (-1.2, -0.5, -0.1))
