"""Random feeds, and which keys their rows see by the plain definition: the oracle of batches and of attention."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotfish.decoding.draft import ancestors
from pilotfish.paged.batch import Feed
from pilotfish.paged.cache import KVCache


@dataclass(frozen=True)
class Case:
    """A feed and the tree it was made from: parents of all nodes, the skipped ones first."""

    feed: Feed
    parents: tuple[int, ...]

    def position(self, key: int) -> int:
        """Of a key, by counting the steps from the trunk's end to its node."""
        trunk_end = self.feed.past + self.feed.num_trunk
        if key < trunk_end:
            return key
        position, node = trunk_end, self.parents[key - trunk_end]
        while node >= 0:
            position, node = position + 1, self.parents[node]
        return position

    def key_of(self, row: int) -> int:
        """A row's own key, counted from the sequence's first."""
        return self.feed.past + row + (self.feed.skipped if row >= self.feed.num_trunk else 0)

    def visible(self, row: int, window: int | None) -> list[int]:
        """The keys this row sees: the text before it, itself, and nothing further back than the window."""
        trunk_end, own = self.feed.past + self.feed.num_trunk, self.key_of(row)
        if own < trunk_end:
            seen = list(range(own + 1))
        else:
            seen, node = list(range(trunk_end)), own - trunk_end
            while node >= 0:
                seen.append(trunk_end + node)
                node = self.parents[node]
        return sorted(key for key in seen if window is None or self.position(own) - self.position(key) < window)


def plain(sequence: str, tokens: Sequence[int], past: int, num_wanted: int | None = None) -> Case:
    """Tokens that follow each other."""
    return Case(Feed(sequence, tokens, past, len(tokens) if num_wanted is None else num_wanted), ())


def tree(sequence: str, parents: Sequence[int], past: int, *, num_trunk: int = 1, skipped: int = 0) -> Case:
    """A tree behind ``num_trunk`` tokens; its first ``skipped`` nodes were written by earlier passes."""
    rows = num_trunk + len(parents) - skipped
    sets = ancestors(tuple(parents))[skipped:]
    return Case(Feed(sequence, range(rows), past, rows, sets, skipped), tuple(parents))


def random_case(sequence: str, source: random.Random) -> Case:
    """Any kind of feed: a prompt, a chunk, one token, a chain, a tree, a level of a tree."""
    past, kind = source.randrange(20), source.randrange(4)
    if kind == 0:
        return plain(sequence, range(source.randrange(1, 9)), past)
    if kind == 1:
        return plain(sequence, [1], past)
    parents = [source.randrange(-1, i) for i in range(source.randrange(1, 9))]
    if kind == 2:
        return tree(sequence, parents, past, num_trunk=source.randrange(1, 4))
    return tree(sequence, parents, past, num_trunk=0, skipped=source.randrange(len(parents)))


def reserve(cache: KVCache, cases: Sequence[Case]) -> None:
    """Open the sequences with their past committed, page by page in turns, so that their pages are interleaved."""
    for case in cases:
        cache.open(case.feed.sequence, [])
    longest = max(case.feed.num_keys for case in cases)
    for rows in range(cache.page_size, longest + cache.page_size, cache.page_size):
        for case in cases:
            assert cache.reserve(case.feed.sequence, min(rows, case.feed.num_keys))
    for case in cases:
        cache.commit(case.feed.sequence, range(case.feed.past), [0] * case.feed.past)


def fill(cache: KVCache, seed: int = 0) -> None:
    """Distinct numbers everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_(generator=generator)
