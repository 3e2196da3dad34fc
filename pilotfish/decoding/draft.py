"""Draft: a drafter's guesses, as a tree in parent form. A chain is the tree with parents -1, 0, 1, ...

It does not know who made the guesses, nor what the target thinks of them.
The one trick: an empty draft is plain decoding, so nothing else in the package needs to know that case.

    pending token ── 0 ── 1 ── 3          tokens  (a, b, c, d)
                 └── 2                    parents (-1, 0, -1, 1)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_NODES = 63  # ancestor sets are 64-bit words


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Guesses after the pending token; node i follows ``parents[i]``, -1 is the pending token itself.

    tokens: the guessed ids, parents before children, siblings all different.
    parents: one index per node, smaller than the node's own.
    probs: [n, V], the law each token was really drawn from, over the target's ids; for a later sibling that is the
        law with the earlier siblings taken out. None: the tokens were not drawn but chosen (a point mass each).
    kind: what sort of guess this is (how long a match, which member of a list), for acceptance to be counted by. For
        drawn tokens it must be known before drawing.
    chances: the drafter's own estimate, per node, that it will be accepted; only for tokens that were chosen.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Tensor | None = None
    kind: Hashable = None
    chances: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) <= MAX_NODES, (len(self.tokens), len(self.parents))
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), self.parents
        assert self.probs is None or len(self.probs) == len(self.tokens), "one law per drawn token"
        assert self.chances is None or len(self.chances) == len(self.tokens), "one estimate per node"
        assert self.chances is None or self.probs is None, "an estimate for a drawn token would look at the draw"
        assert self.is_chain or len(set(zip(self.parents, self.tokens, strict=True))) == len(self), "siblings differ"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node has the one before it as its parent."""
        return self.parents == _chain_parents(len(self.tokens))

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        if self.is_chain:
            return len(self)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths)

    def children(self) -> list[list[int]]:
        """Children of each node in order, and at index -1 (the last entry) those of the pending token."""
        lists: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            lists[parent].append(node)
        return lists

    def paths(self) -> list[tuple[int, ...]]:
        """For each node the tokens from the pending token's child down to it, itself included."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths

    def first(self, n: int) -> Draft:
        """The first n nodes. A cut by position is exact for drawn tokens too: it never looks at what was drawn."""
        if n >= len(self):
            return self
        probs = None if self.probs is None else self.probs[:n]
        chances = None if self.chances is None else self.chances[:n]
        return Draft(self.tokens[:n], self.parents[:n], probs, self.kind, chances)


def chain(
    tokens: Sequence[int],
    probs: Tensor | None = None,
    kind: Hashable = None,
    chances: tuple[float, ...] | None = None,
) -> Draft:
    """A draft without branches."""
    return Draft(tuple(tokens), _chain_parents(len(tokens)), probs, kind, chances)


def accepted_nodes(draft: Draft, tokens: Sequence[int]) -> set[int]:
    """The nodes on the accepted path, read off the tokens that were accepted."""
    nodes: set[int] = set()
    children, node = draft.children(), -1
    for token in tokens:
        node = next(child for child in children[node] if draft.tokens[child] == token)
        nodes.add(node)
    return nodes


@lru_cache(maxsize=4096)
def ancestors(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Per node a 64-bit set of the nodes it may see: its ancestors and itself (bit i is node i)."""
    sets: list[int] = []
    for node, parent in enumerate(parents):
        sets.append((sets[parent] if parent >= 0 else 0) | 1 << node)
    return tuple(sets)


@lru_cache(maxsize=MAX_NODES + 2)
def _chain_parents(n: int) -> tuple[int, ...]:
    return tuple(range(-1, n - 1))


EMPTY = Draft()  # plain decoding
