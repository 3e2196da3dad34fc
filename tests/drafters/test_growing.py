"""Trees of guesses against brute force: the best nodes of all, found while looking at few."""

import itertools
import math

import pytest
import torch

from pilotfish.decoding.draft import MAX_NODES
from pilotfish.drafters.growing import Growth, confidence

NUM_IDS = 5


def law(path: tuple[int, ...]) -> list[float]:
    """Log-probabilities behind a path, any at all but always the same."""
    generator = torch.Generator().manual_seed(hash((17, *path)) % 2**31)
    return torch.randn(NUM_IDS, generator=generator, dtype=torch.float64).mul(1.5).log_softmax(0).tolist()


def grow(limit: int, width: int, depth: int, **more) -> Growth:
    growth = Growth(limit, width, depth, **more)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    while True:
        lines = [law(paths[node]) for node in growth.frontier or [-1]]
        order = [sorted(range(NUM_IDS), key=lambda i, line=line: -line[i]) for line in lines]
        first = len(growth.tokens)
        growth.add(order, [[line[i] for i in ids] for line, ids in zip(lines, order, strict=True)])
        for node in range(first, len(growth.tokens)):
            paths[node] = (*paths[growth.parents[node]], growth.tokens[node])
        if not growth.frontier:
            return growth
        for node, bits in zip(growth.frontier, growth.ancestors(), strict=True):
            names = {number: paths[seen] for seen, number in growth.seen.items()}
            found = {names[number] for number in range(64) if bits >> number & 1}
            assert found == {paths[node][: i + 1] for i in range(len(paths[node]))}, "ancestors and itself"


def brute_force(limit: int, depth: int) -> set[tuple[int, ...]]:
    values = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(NUM_IDS), repeat=length):
            values[path] = sum(law(path[:i])[token] for i, token in enumerate(path))
    return set(sorted(values, key=lambda path: -values[path])[:limit])


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("limit", [1, 2, 7, 20, MAX_NODES])
def test_the_best_nodes_of_all_are_found(limit, depth):
    draft = grow(limit, width=100, depth=depth).draft("sort")
    assert set(draft.paths()) == brute_force(limit, depth)
    assert draft.kind == "sort"


def test_a_narrow_search_finds_other_nodes():
    """The control: were width ignored, this would find the best."""
    assert set(grow(20, width=1, depth=4).draft().paths()) != brute_force(20, 4)


def test_few_nodes_are_looked_at():
    growth = grow(8, width=100, depth=6)
    assert len(growth.seen) < 20  # of 5 + 25 + ... + 3125
    assert len(grow(MAX_NODES, width=60, depth=8).seen) <= MAX_NODES


def test_nodes_come_best_first_and_a_cut_keeps_the_best():
    whole = grow(20, width=9, depth=4).draft()
    for n in (1, 5, 12):
        assert whole.first(n).paths() == whole.paths()[:n]
        assert set(whole.first(n).paths()) == brute_force(n, 4)


def test_nothing_grows_behind_the_end_of_text():
    assert all(2 not in path[:-1] for path in grow(40, width=20, depth=4, barren={2}).draft().paths())


def test_a_broken_law_ends_the_tree():
    growth = Growth(5, 3, 3)
    growth.add([[1, 2]], [[-0.1, math.nan]])
    assert growth.frontier == [0]
    growth.add([[1, 2]], [[math.nan, math.nan]])
    assert growth.draft().tokens == (1,) and growth.frontier == []


def test_rounding_above_certainty_keeps_parents_first():
    growth = Growth(3, 2, 3)
    growth.add([[1]], [[1e-7]])
    growth.add([[1]], [[1e-7]])
    assert growth.draft().parents == (-1, 0)


def test_confidence_has_four_sorts():
    assert [confidence(math.log(p)) for p in (0.1, 0.5, 0.8, 0.99)] == [0, 1, 2, 3]
