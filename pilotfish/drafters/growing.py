"""Growing a tree of guesses: what to look at next, and which nodes to hand out.

It does not know models. Two kinds, which take what a model says behind their frontier, level by level:

`Growth` chooses (EAGLE-2, Li et al. 2024, 2406.16858). The one trick: a node's value is the log-probability of its
path, which never rises on the way down; so the best n nodes are a tree, and a node that is not among the best n now has
no descendant that will be. Only the others are looked at, which finds the same tree in fewer rows.

`Drawing` draws, siblings without replacement, into a shape that was settled before (see `shapes`). All that is drawn is
handed out: which nodes have children, and how many, is a matter of the shape, of the laws, and of what was drawn above.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from ..decoding.draft import EMPTY, MAX_NODES, Draft
from ..decoding.noise import SeededNoise
from ..decoding.request import Request
from ..decoding.sampling import likeliest
from ..lazily import np, torch
from .drawing import stacked
from .shapes import RankPath

if TYPE_CHECKING:
    from torch import Tensor


class Tree:
    """One tree in the making. Nodes are numbered in the order they were found. Those that were looked at have a second
    number, in that order."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.frontier: list[int] = []  # nodes to look at next
        self.sources: list[int] = []  # the parent of each, as a row of what was looked at before
        self.seen: dict[int, int] = {}  # node -> its number among those looked at
        self._ancestors: dict[int, int] = {}  # a seen node's ancestors and itself, as bits of those numbers
        self._level = 0

    @property
    def num_skipped(self) -> int:
        """How many nodes were looked at before the frontier."""
        return len(self.seen) - len(self.frontier)

    def ancestors(self) -> tuple[int, ...]:
        """Of each node in the frontier, as `pilotfish.paged.batch.Feed` wants them."""
        return tuple(self._ancestors[node] for node in self.frontier)

    def _look_at(self, nodes: list[int]) -> None:
        row_of = {node: row for row, node in enumerate(self.frontier or [-1])}
        self._level += 1
        self.frontier, self.sources = nodes, [row_of[self.parents[node]] for node in nodes]
        for node in nodes:
            number, parent = len(self.seen), self.parents[node]
            self._ancestors[node] = (self._ancestors[parent] if parent >= 0 else 0) | 1 << number
            self.seen[node] = number


class Growth(Tree):
    """A tree that is chosen. limit: nodes wanted. width: most nodes looked at in one pass. depth: longest path.
    barren: tokens that end a text. level_cost: of a pass that looks at a level, in passes of the target; a level that
    promises less than it takes is not looked at."""

    def __init__(self, limit: int, width: int, depth: int, barren: Set[int] = frozenset(), level_cost: float = 0.0):
        super().__init__()
        self.limit, self.width, self.depth, self.barren, self.level_cost = limit, width, depth, barren, level_cost
        self.values: list[float] = []

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
        self._look_at(self._fertile(found))

    @property
    def num_scratch(self) -> int:
        """Most nodes that will have been looked at."""
        return min(MAX_NODES, (self.depth - 1) * self.width)

    def draft(self, kind: object = None) -> Draft:
        """The best nodes, the best first, and the probabilities of their paths."""
        nodes = self._best()
        if not nodes:
            return EMPTY
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            tuple(self.tokens[node] for node in nodes),
            tuple(places[self.parents[node]] for node in nodes),
            kind=kind,
            chances=tuple(math.exp(self.values[node]) for node in nodes),
        )

    def _best(self) -> list[int]:
        likely = [node for node, value in enumerate(self.values) if value > -math.inf]
        return sorted(likely, key=lambda node: (-self.values[node], node))[: self.limit]

    def _fertile(self, found: Sequence[int]) -> list[int]:
        """Of the nodes just found, those that a wanted node may follow, the best first."""
        if self._level + 1 >= self.depth:
            return []
        best, new = self._best()[: self.limit - 1], set(found)
        fertile = [node for node in best if node in new and self.tokens[node] not in self.barren]
        fertile = fertile[: min(self.width, MAX_NODES - len(self.seen))]
        return fertile if self._pays(fertile) else []

    def _pays(self, nodes: Sequence[int]) -> bool:
        """Whether looking at these raises tokens per second. What follows them is believed to hold the right token as
        often as the first guesses do."""
        if not self.level_cost:
            return True
        best = [(math.exp(self.values[node]), self.parents[node]) for node in self._best()]
        first, tokens = sum(value for value, parent in best if parent < 0), 1 + sum(value for value, _ in best)
        gain = first * sum(math.exp(self.values[node]) for node in nodes)
        return gain * (1 + self.level_cost * (self._level + 1)) > self.level_cost * tokens


class Drawing(Tree):
    """A tree that is drawn. shape: parents and earlier siblings first. ids_M: the token of each entry of a law."""

    def __init__(self, request: Request, shape: Sequence[RankPath], ids_M: Tensor):
        super().__init__()
        self.request, self.ids_M = request, ids_M
        self.laws: list[Tensor] = []
        self.paths: dict[int, RankPath] = {-1: ()}
        self._place = {path: place for place, path in enumerate(shape)}
        self._num_children = Counter(path[:-1] for path in shape)
        # Positions count from the settled text: a drafter's drafter meets the coins that decide what it guesses.
        self._noise = SeededNoise(request.seed, request.num_settled)
        self._coins = {
            path: sum(len(other) == len(path) for other in shape[:place]) for path, place in self._place.items()
        }

    @property
    def num_scratch(self) -> int:
        """Most nodes that will have been looked at."""
        return sum(path != () for path in self._num_children)

    def add(self, laws: Sequence[Tensor]) -> None:
        """What may follow: a law [M] per node of the frontier, or one for the pending token at first. Behind a broken
        one (NaN) nothing follows, and what was drawn before stays: to drop it for that would be a bias."""
        found: list[int] = []
        for parent, q_M in zip(self.frontier or [-1], laws, strict=True):
            if not math.isnan(likeliest(q_M[None])[1][0]):
                found += self._draw(parent, q_M)
        fertile = [node for node in found if self._num_children[self.paths[node]]]
        self._look_at([node for node in fertile if self.tokens[node] not in self.request.stop_ids])

    def _draw(self, parent: int, q_M: Tensor) -> list[int]:
        """Children of a node, as many as it shall have, or as there are tokens with a chance."""
        nodes: list[int] = []
        for rank in range(self._num_children[self.paths[parent]]):
            path, depth = (*self.paths[parent], rank), self.request.num_guessed + self._level
            drawn = self._noise.draw(depth, q_M, self._coins[path])
            nodes.append(len(self.tokens))
            self.paths[nodes[-1]] = path
            self.tokens.append(int(self.ids_M[drawn]))
            self.parents.append(parent)
            self.laws.append(q_M)
            left_M = without(q_M, drawn)
            if left_M is None:
                break
            q_M = left_M
        return nodes

    def draft(self, num_ids: int, kind: object = None) -> Draft:
        """In the order of the shape. num_ids: of the target, over whose ids the laws are given."""
        if not self.tokens:
            return EMPTY
        nodes = sorted(range(len(self.tokens)), key=lambda node: self._place[self.paths[node]])
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        q_NV = spread([self.laws[node] for node in nodes], self.ids_M, num_ids)
        tokens = [self.tokens[node] for node in nodes]
        return Draft(tuple(tokens), tuple(places[self.parents[node]] for node in nodes), q_NV, kind)


def without(q_M: Tensor, drawn: int) -> Tensor | None:
    """The law of the next draw from q without this one; None if nothing is left. On a CPU numpy's, on one thread: see
    `decoding.sampling`."""
    if q_M.device.type == "cpu":
        left = q_M.numpy().copy()
        left[drawn] = 0
        total = left.sum()
        return torch.from_numpy(np.divide(left, total, out=left)) if total > 0 else None
    left_M = q_M.clone()
    left_M[drawn] = 0
    return left_M / total_M if float(total_M := left_M.sum()) > 0 else None


def spread(laws: Sequence[Tensor], ids_M: Tensor, num_ids: int) -> Tensor:
    """Laws over some ids, [M] each, as laws over all of them, [N, num_ids]."""
    q_NM = stacked(laws)
    if q_NM.shape[1] == num_ids:
        return q_NM
    if q_NM.device.type == "cpu":
        q_NV = np.zeros((len(laws), num_ids), q_NM.numpy().dtype)
        q_NV[:, ids_M.numpy()] = q_NM.numpy()
        return torch.from_numpy(q_NV)
    return q_NM.new_zeros(len(laws), num_ids).index_copy_(1, ids_M, q_NM)


def best(logits_TV: Tensor, num: int) -> tuple[Tensor, list[list[float]]]:
    """Of each row the ``num`` likeliest places, the likeliest first, and their log-probabilities.

    On a CPU row by row, and the sum in numpy: torch would split so little work between threads, and whoever keeps one
    of them waiting makes it a hundred times as long.
    """
    if logits_TV.device.type != "cpu":
        best_TK, ids_TK = logits_TV.topk(num, dim=1)
        return ids_TK, (best_TK - logits_TV.logsumexp(1, keepdim=True)).tolist()
    ids: list[Tensor] = []
    logprobs: list[list[float]] = []
    for logits_V in logits_TV:
        best_K, ids_K = logits_V.topk(num)
        largest = best_K[0]
        total = math.log(float(np.exp(logits_V.numpy() - largest.numpy()).sum()))
        ids.append(ids_K)
        logprobs.append((best_K - largest - total).tolist())
    return torch.stack(ids), logprobs


def confidence(logprob: float) -> int:
    """How sure a first guess is, in four sorts: kinds of drafts, for their acceptance to be counted by."""
    return sum(logprob > bound for bound in (-1.2, -0.5, -0.1))
