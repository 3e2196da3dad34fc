"""Shapes of trees, before anything is guessed: from how often the guess of each rank was right, the best n nodes.

They do not know tokens, laws or models. A shape is a list of paths of ranks; rank b is the b-th guess after the same
text. The one trick is Sequoia's recurrence (Chen et al. 2024, arXiv 2402.12374, section 4.1): with m nodes left for the
ranks from b on, rank b and what follows it get y of them, the later ranks the rest. For all m at once that is one
maximum over a table.

    G[b][m] = max over y of  P[b] (1 + G'[0][y - 1]) + (1 - P[b]) G[b + 1][m - y],      G' a level deeper

P[b] is the chance of rank b where the ranks before it were wrong; it may differ from level to level. A shape looks at
past drafts alone, so tokens may be drawn into it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..decoding.draft import MAX_NODES, Draft, accepted_nodes
from ..lazily import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RankPath = tuple[int, ...]
Rates = Sequence[Sequence[float]]  # [level][rank]; what is deeper is as the last level

_EVERY = 64  # drafts after which shapes follow what was learned
_FADE = 0.9  # weight of the past when they do: a rank that was not tried for long is believed to be as at first
_WEIGHT = 6.0  # tries that the prior is worth


class Shapes:
    """The best trees by given rates, for any number of nodes and any depth."""

    def __init__(self, rates: Rates):
        assert rates and all(0 <= rate <= 1 for level in rates for rate in level), rates
        self.rates = [list(level) for level in rates]
        self._trees: dict[tuple[int, int], list[RankPath]] = {}
        self._tables: dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.int64]]] = {}

    def expected_tokens(self, num_nodes: int, depth: int) -> float:
        """Of a pass with the best tree of at most so many nodes and levels, the target's own token included."""
        return 1.0 + (float(self._table(0, depth)[0][0, num_nodes]) if depth else 0.0)

    def tree(self, num_nodes: int, depth: int) -> list[RankPath]:
        """That tree: parents and earlier siblings first, else the likeliest first. Its first n nodes are a tree too,
        and the best of n nodes where no rank is right more often than the one before it."""
        if (num_nodes, depth) not in self._trees:
            self._trees[num_nodes, depth] = self._tree(num_nodes, depth)
        return self._trees[num_nodes, depth]

    def size(
        self, sizes: Iterable[int], depth: int, draft_cost: float, target_cost: Callable[[int], float]
    ) -> tuple[int, int]:
        """(nodes, levels) with the least (levels * draft_cost + target_cost(nodes)) per expected token; of equals the
        smaller. sizes: numbers of nodes to choose from. draft_cost: of one level, in the unit of target_cost."""

        def cost(num_nodes: int, levels: int) -> float:
            return (levels * draft_cost + target_cost(num_nodes)) / self.expected_tokens(num_nodes, levels)

        found = [(n, levels) for n in sorted(sizes) for levels in (range(1, min(n, depth) + 1) if n else (0,))]
        return min(found, key=lambda size: cost(*size))

    def _tree(self, num_nodes: int, depth: int) -> list[RankPath]:
        wanted = set(self._paths(0, depth, num_nodes, ()))
        waiting: list[tuple[float, RankPath, float]] = []
        paths: list[RankPath] = []

        def offer(path: RankPath, reached: float) -> None:
            """reached: the chance that it comes to this rank, its own not counted."""
            if path in wanted:
                heapq.heappush(waiting, (-reached * self._rate(path), path, reached))

        offer((0,), 1.0)
        while waiting:
            _, path, reached = heapq.heappop(waiting)
            paths.append(path)
            rate = self._rate(path)
            offer((*path[:-1], path[-1] + 1), reached * (1 - rate))
            offer((*path, 0), reached * rate)
        assert len(paths) == len(wanted)
        return paths

    def _rate(self, path: RankPath) -> float:
        return self.rates[min(len(path), len(self.rates)) - 1][path[-1]]

    def _table(self, level: int, depth: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """From this level on, of at most ``depth`` levels: gains and y, [ranks + 1, nodes + 1]. 0: a rank gets none."""
        level = min(level, len(self.rates) - 1)
        if (level, depth) not in self._tables:
            rates = self.rates[level]
            gains = np.zeros((len(rates) + 1, MAX_NODES + 1))
            given = np.zeros(gains.shape, dtype=np.int64)
            inner = self._table(level + 1, depth - 1)[0][0] if depth > 1 else gains[-1]
            left = np.arange(MAX_NODES + 1)[:, None] - np.arange(1, MAX_NODES + 1)[None]  # m - y
            for rank in reversed(range(len(rates))):
                own = rates[rank] * (1 + inner[:-1])
                rest = (1 - rates[rank]) * gains[rank + 1]
                sums = np.where(left >= 0, own + rest[left], 0.0)
                best = sums.argmax(1)
                gains[rank] = sums[range(len(sums)), best]
                given[rank] = np.where(gains[rank] > 0, best + 1, 0)
            self._tables[level, depth] = gains, given
        return self._tables[level, depth]

    def _paths(self, level: int, depth: int, num_nodes: int, path: RankPath) -> list[RankPath]:
        if depth == 0:
            return []
        given, paths = self._table(level, depth)[1], list[RankPath]()
        for rank in range(len(given) - 1):
            count = int(given[rank, num_nodes])
            if count == 0:
                break
            paths += [(*path, rank), *self._paths(level + 1, depth - 1, count - 1, (*path, rank))]
            num_nodes -= count
        return paths


class Ranks:
    """How often the guess of each rank was right where those before it were wrong, learned while running.

    prior: what is believed at first; as many levels and ranks as it has are told apart. shapes: by what was learned, as
    of late.
    """

    def __init__(self, prior: Rates):
        self.prior = [list(level) for level in prior]
        self.hits = [[0.0] * len(level) for level in prior]
        self.tries = [[0.0] * len(level) for level in prior]
        self.shapes = Shapes(prior)
        self._num_drafts = 0

    def rates(self) -> list[list[float]]:
        return [
            [(hits + _WEIGHT * prior) / (tries + _WEIGHT) for hits, tries, prior in zip(*level, strict=True)]
            for level in zip(self.hits, self.tries, self.prior, strict=True)
        ]

    def note(self, level: int, rank: int | None, num_tried: int) -> None:
        """At this level the guess of this rank was right; None: none of those tried was."""
        level = min(level, len(self.prior) - 1)
        for tried in range(min(num_tried if rank is None else rank + 1, len(self.prior[level]))):
            self.tries[level][tried] += 1
            self.hits[level][tried] += tried == rank

    def note_tree(self, draft: Draft, accepted: Sequence[int]) -> None:
        """What became of a tree whose siblings stand in order of rank. accepted: tokens of it, all that were."""
        if accepted and tuple(accepted) not in draft.paths():
            return  # another draft was judged
        kept, children = accepted_nodes(draft, accepted), draft.children()
        for level, node in enumerate((-1, *sorted(kept))):
            if children[node]:
                rank = next((rank for rank, child in enumerate(children[node]) if child in kept), None)
                self.note(level, rank, len(children[node]))
        self.count()

    def count(self) -> None:
        """One draft more was noted."""
        self._num_drafts += 1
        if self._num_drafts % _EVERY == 0:
            self.shapes = Shapes(self.rates())
            self.hits, self.tries = (
                [[_FADE * n for n in level] for level in table] for table in (self.hits, self.tries)
            )


def rates_of(by_level: Sequence[float], by_rank: Sequence[float]) -> list[list[float]]:
    """Rates from shares: how often the first rank is right at each level, and the others as parts of that."""
    rates: list[list[float]] = []
    for first in by_level:
        left, level = 1.0, list[float]()
        for part in by_rank:
            level.append(min(1.0, first * part / left) if left > 0 else 0.0)
            left -= first * part
        rates.append(level)
    return rates
