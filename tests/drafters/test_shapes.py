"""Shapes of trees against brute force over all trees, what is learned of ranks, and the price of a level."""

import itertools
import random
from collections.abc import Iterator

import pytest

from pilotfish.decoding.draft import MAX_NODES, Draft
from pilotfish.drafters.shapes import RankPath, Ranks, Shapes, rates_of

FALLING = [[0.7, 0.4, 0.3], [0.5, 0.3, 0.2], [0.4, 0.2, 0.1]]


def trees(num_nodes: int, depth: int, num_ranks: int) -> Iterator[frozenset[RankPath]]:
    """All trees of exactly so many nodes in which each node has its parent and its earlier siblings."""
    found = {frozenset[RankPath]()}
    for _ in range(num_nodes):
        grown = set()
        for tree in found:
            for path in ((), *tree):
                rank = sum(other[:-1] == path for other in tree)
                if len(path) < depth and rank < num_ranks:
                    grown.add(tree | {(*path, rank)})
        found = grown
    return iter(found)


def worth(tree: frozenset[RankPath] | list[RankPath], rates: list[list[float]]) -> float:
    """Expected tokens, node by node: a node counts if its ancestors were right and its earlier siblings wrong."""
    total = 1.0
    for path in tree:
        chance = 1.0
        for level, rank in enumerate(path):
            own = rates[min(level, len(rates) - 1)]
            chance *= own[rank]
            for before in own[:rank]:
                chance *= 1 - before
        total += chance
    return total


def random_rates(seed: int, num_levels: int, num_ranks: int) -> list[list[float]]:
    """In no order: a later rank may be the better one."""
    source = random.Random(seed)
    return [[source.random() for _ in range(num_ranks)] for _ in range(num_levels)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("seed", "num_levels"), [(0, 1), (1, 2), (2, 3), (3, 3)])
def test_no_tree_is_better(seed, num_levels, depth):
    rates = random_rates(seed, num_levels, 3)
    for num_nodes in range(1, 7):
        shapes = Shapes(rates)
        best = max(worth(t, rates) for n in range(num_nodes + 1) for t in trees(n, depth, 3))
        tree = shapes.tree(num_nodes, depth)
        assert len(tree) == len(set(tree)) <= num_nodes and max(map(len, tree)) <= depth
        assert worth(tree, rates) == pytest.approx(best, abs=1e-12)
        assert shapes.expected_tokens(num_nodes, depth) == pytest.approx(best, abs=1e-12)


def test_a_chain_would_be_worse():
    """The control: were it enough to be a tree, this would be the best."""
    assert worth([(0,) * d for d in range(1, 7)], FALLING) < Shapes(FALLING).expected_tokens(6, 6) - 0.1


def test_more_nodes_and_levels_are_never_worse():
    for seed in range(4):
        shapes = Shapes(random_rates(seed, 2, 4))
        table = [[shapes.expected_tokens(n, depth) for n in range(MAX_NODES + 1)] for depth in range(7)]
        for line, below in itertools.pairwise(table):
            assert all(a <= b + 1e-12 for a, b in zip(line, below, strict=True))
        for line in table:
            assert line[0] == 1 and all(a <= b + 1e-12 for a, b in itertools.pairwise(line))


@pytest.mark.parametrize("seed", range(4))
def test_parents_and_earlier_siblings_come_first(seed):
    tree = Shapes(random_rates(seed, 3, 4)).tree(MAX_NODES, 5)
    for place, path in enumerate(tree):
        assert len(path) == 1 or path[:-1] in tree[:place]
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree[:place]


def test_the_beginning_of_a_tree_is_the_best_smaller_tree():
    shapes = Shapes(FALLING)
    tree = shapes.tree(40, 4)
    for n in range(41):
        assert worth(tree[:n], FALLING) == pytest.approx(shapes.expected_tokens(n, 4), abs=1e-12)


def test_the_size_is_the_one_with_the_best_pace():
    shapes = Shapes(FALLING)
    for draft_cost, slope in [(0.02, 0.01), (0.1, 0.05), (0.3, 0.0), (0.0, 0.2)]:
        cost = lambda n, slope=slope: 1 + slope * n  # noqa: E731
        n, depth = shapes.size(range(20), 5, draft_cost, cost)
        pace = shapes.expected_tokens(n, depth) / (depth * draft_cost + cost(n))
        for other in range(20):
            for levels in range(1, 6) if other else (0,):
                mine = max(worth(t, FALLING) for t in [shapes.tree(other, levels)])
                assert mine / (levels * draft_cost + cost(other)) <= pace + 1e-12


def test_where_levels_are_dear_trees_are_flat_and_where_nothing_pays_there_is_none():
    shapes = Shapes(FALLING)
    depths = [shapes.size([12], 6, cost, lambda _n: 1.0)[1] for cost in (0.0, 0.1, 0.5, 9.0)]
    assert depths[0] > depths[-1] == 1 and depths == sorted(depths, reverse=True)
    assert shapes.size(range(20), 6, 5.0, lambda n: 1 + n) == (0, 0)


def test_rates_are_what_is_left_by_the_ranks_before():
    assert rates_of([0.5], [1.0, 0.5, 0.5]) == [[0.5, 0.5, 1.0]]
    assert rates_of([0.8, 0.4], [1.0, 0.25]) == [[0.8, pytest.approx(1.0)], [0.4, pytest.approx(1 / 6)]]


# -- what is learned -------------------------------------------------------------------------------------------------


def simulate(ranks: Ranks, truth: list[list[float]], num_drafts: int, num_nodes: int = 12, seed: int = 0) -> None:
    """Drafts of the shapes it has, and what becomes of them."""
    source = random.Random(seed)
    for _ in range(num_drafts):
        shape = ranks.shapes.tree(num_nodes, 4)
        place = {path: node for node, path in enumerate(shape)} | {(): -1}
        draft = Draft(tuple(range(len(shape))), tuple(place[path[:-1]] for path in shape))
        path: RankPath = ()
        while True:
            own = truth[min(len(path), len(truth) - 1)]
            tried = [rank for rank in range(len(own)) if (*path, rank) in place]
            right = next((rank for rank in tried if source.random() < own[rank]), None)
            if right is None:
                break
            path = (*path, right)
        ranks.note_tree(draft, [place[path[:n]] for n in range(1, len(path) + 1)])


def test_it_learns_the_truth_and_the_shapes_follow():
    truth = [[0.3, 0.5, 0.1], [0.8, 0.1, 0.1]]
    ranks = Ranks([[0.6, 0.3, 0.2], [0.5, 0.3, 0.2]])
    before = ranks.shapes.tree(6, 4)
    simulate(ranks, truth, 2000)
    first, second = ranks.rates()
    assert first[:2] == pytest.approx(truth[0][:2], abs=0.09)
    assert second[0] == pytest.approx(truth[1][0], abs=0.09) and second[1] < 0.3, "seldom tried: on the way"
    assert ranks.shapes.tree(6, 4) != before
    assert worth(ranks.shapes.tree(6, 4), truth) > worth(before, truth) + 0.05
    assert worth(ranks.shapes.tree(6, 4), truth) > 0.99 * Shapes(truth).expected_tokens(6, 4)


def test_shapes_change_seldom():
    ranks = Ranks([[0.5, 0.2]])
    kinds = set()
    for _ in range(640):
        ranks.note(0, None, 2)
        ranks.count()
        kinds.add(id(ranks.shapes))
    assert len(kinds) <= 11


def test_what_is_not_tried_for_long_is_believed_again():
    ranks = Ranks([[0.5, 0.4]])
    for _ in range(300):
        ranks.note(0, None, 2)
        ranks.count()
    low = ranks.rates()[0][1]
    for _ in range(3000):
        ranks.note(0, 0, 1)
        ranks.count()
    assert low < 0.05 and ranks.rates()[0][1] > 0.3


def test_ranks_behind_the_right_one_were_not_tried():
    ranks = Ranks([[0.5, 0.5, 0.5]])
    ranks.note(0, 1, 3)
    assert ranks.tries == [[1, 1, 0]] and ranks.hits == [[0, 1, 0]]
    ranks.note(7, None, 9)
    assert ranks.tries == [[2, 2, 1]] and ranks.hits == [[0, 1, 0]], "deeper levels are as the last"


def test_of_another_draft_nothing_is_learned():
    ranks = Ranks([[0.5, 0.5]])
    draft = Draft((5, 6, 7), (-1, -1, 0))
    ranks.note_tree(draft, (4,))
    assert ranks.tries == [[0, 0]]
    ranks.note_tree(draft, (6,))  # 5 was wrong, 6 right, and nothing followed it
    assert ranks.tries == [[1, 1]] and ranks.hits == [[0, 1]]
    ranks.note_tree(draft, (5,))  # 5 was right, and 7 behind it wrong
    assert ranks.tries == [[3, 1]] and ranks.hits == [[1, 1]]
