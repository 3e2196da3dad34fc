"""Trees of guesses. Chosen ones against brute force: the best nodes of all, found while looking at few. Drawn ones
against their definition, and with the real verification and the real keys of its noise, branch by branch."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pilotfish.decoding.draft import MAX_NODES, Draft
from pilotfish.decoding.noise import SeededNoise
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.decoding.verify import verify
from pilotfish.drafters.growing import Drawing, Growth, best, confidence
from pilotfish.drafters.shapes import RankPath, Shapes
from tests.decoding.enumeration import (
    Branch,
    Law,
    Outcome,
    Tokens,
    after,
    emitted,
    outcome,
    seeded_noise_on,
    tables,
    target_rows,
)

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


def test_a_level_is_looked_at_where_it_promises_more_than_it_takes():
    """By hand: first guesses of .6 and .2, so .8 of .8 behind both; a pass of the target and two of the head would then
    give 1.8 + .64 tokens for 1 + 2 c, against 1.8 for 1 + c."""
    for cost, deeper in ((0.0, True), (0.5, True), (0.56, False), (2.0, False)):
        growth = Growth(5, 3, 9, level_cost=cost)
        growth.add([[1, 2]], [[math.log(0.6), math.log(0.2)]])
        assert bool(growth.frontier) == deeper == ((1.8 + 0.64) / (1 + 2 * cost) > 1.8 / (1 + cost)), cost


def test_sure_guesses_are_followed_further():
    depths = []
    for sure in (0.3, 0.6, 0.95):
        growth = Growth(20, 3, 8, level_cost=0.3)
        growth.add([[1, 2]], [[math.log(sure), math.log(0.01)]])
        while growth.frontier:
            lines = [[math.log(sure), math.log(0.01)]] * len(growth.frontier)
            growth.add([[1, 2]] * len(lines), lines)
        depths.append(growth.draft().depth)
    assert depths == sorted(depths) and depths[0] == 1 and depths[2] > 4


@pytest.mark.parametrize("rows", [1, 3])
def test_the_best_of_a_row_and_their_log_probabilities(rows):
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(3)) * 4
    ids, logprobs = best(logits, 5)
    expected = logits.log_softmax(1).topk(5, dim=1)
    assert ids.tolist() == expected.indices.tolist()
    assert torch.tensor(logprobs) == pytest.approx(expected.values, abs=1e-6)
    assert all(map(math.isnan, best(torch.full((1, 4), math.nan), 2)[1][0])), "a broken law is one afterwards"


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


def test_chances_are_the_probabilities_of_paths_and_never_rise():
    draft = grow(20, width=9, depth=4).draft()
    for path, chance in zip(draft.paths(), draft.chances, strict=True):
        assert chance == pytest.approx(math.exp(sum(law(path[:i])[token] for i, token in enumerate(path))))
    assert all(
        parent < 0 or draft.chances[parent] >= own for parent, own in zip(draft.parents, draft.chances, strict=True)
    )
    assert list(draft.chances) == sorted(draft.chances, reverse=True)


# -- trees that are drawn --------------------------------------------------------------------------------------------

VOCAB = 3
BROAD: list[RankPath] = [(0,), (1,), (0, 0), (1, 0), (0, 1)]
DEEP: list[RankPath] = [(0,), (0, 0), (1,), (0, 0, 0)]
NARROW: list[RankPath] = [(0,), (0, 0), (1,)]


def request_at(tokens: Sequence[int], stop_ids: Sequence[int] = (), seed: int = 0) -> Request:
    request = Request("r", (0,), SamplingParams(max_tokens=99), seed, "rejection", 999, frozenset(stop_ids))
    request.tokens += tokens
    return request


def draw(q: Law, shape: Sequence[RankPath], request: Request) -> Draft:
    """A drawing with the laws of a table behind the request's text."""
    num_ids = len(q(()))
    tree = Drawing(request, shape, torch.arange(num_ids))
    nodes: list[Tokens] = [()]
    while nodes:
        tree.add([q(path) for path in nodes])
        paths: list[Tokens] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        former, nodes = nodes, [paths[node] for node in tree.frontier]
        assert [former[source] for source in tree.sources] == [path[:-1] for path in nodes]
    assert len(tree.seen) <= tree.num_scratch
    return tree.draft(num_ids, "drawn")


def test_a_drawing_has_its_shape_and_the_laws_it_was_drawn_from():
    q, shape = tables(1, 6, 5), Shapes([[0.6, 0.5, 0.4]]).tree(20, 4)
    for seed in range(30):
        draft = draw(q, shape, request_at((), seed=seed))
        place = {path: node for node, path in enumerate(shape)} | {(): -1}
        assert draft.parents == tuple(place[path[:-1]] for path in shape)
        for node, (rank_path, path) in enumerate(zip(shape, draft.paths(), strict=True)):
            law_V = q(path[:-1]).clone()
            for rank in range(rank_path[-1]):
                law_V[draft.tokens[place[*rank_path[:-1], rank]]] = 0
            torch.testing.assert_close(draft.probs[node], law_V / law_V.sum())
            assert draft.probs[node, path[-1]] > 0
    assert draft.kind == "drawn" and draft.chances is None


def test_as_many_children_as_there_are_tokens_with_a_chance():
    draft = draw(lambda _path: torch.tensor([0.0, 0.5, 0.5, 0.0]), [(0,), (1,), (2,), (3,), (2, 0)], request_at(()))
    assert sorted(draft.tokens) == [1, 2]


def test_nothing_is_drawn_behind_the_end_of_text_or_a_broken_law():
    q, shape = tables(1, 3, 4), [(0,), (1,), (2,), (0, 0), (1, 0), (2, 0)]
    for seed in range(5):
        paths = draw(q, shape, request_at((), stop_ids=[2], seed=seed)).paths()
        assert {path for path in paths if len(path) == 1} == {(0,), (1,), (2,)}
        assert {path[0] for path in paths if len(path) == 2} == {0, 1}
        broken = draw(lambda path: q(path) * (math.nan if path == (1,) else 1), shape, request_at((), seed=seed))
        assert {path[0] for path in broken.paths() if len(path) == 2} == {0, 2} and len(broken) == 5
    assert not len(draw(lambda path: q(path) * math.nan, shape, request_at(())))


def test_no_two_nodes_share_a_coin_and_none_is_the_verification_s(monkeypatch):
    seen: list[Any] = []
    real = SeededNoise.draw

    def watched(self, depth, q_V, sibling=0):
        seen.append((self.seed, self.position, depth, sibling))
        return real(self, depth, q_V, sibling)

    monkeypatch.setattr(SeededNoise, "draw", watched)
    shape = Shapes([[0.6, 0.5, 0.4]]).tree(30, 4)
    draw(tables(1, 6, 5), shape, request_at(()))
    assert len(seen) == len(set(seen)) == 30


def texts(
    p: Law,
    q: Law,
    shape: Sequence[RankPath],
    length: int,
    *,
    stop_ids: Sequence[int] = (),
    most: int = MAX_NODES,
    twist: Callable[[Draft, Law], Draft] = lambda draft, _q: draft,
) -> Outcome:
    """What decoding pass after pass makes of the target. most: a cut by position. twist: what is done to drafts."""

    def run(branch: Branch) -> tuple[Tokens, int]:
        tokens: Tokens = ()
        num_accepted = 0
        with seeded_noise_on(branch):
            while len(tokens) < length:
                room = length - len(tokens) - 1
                request, own = request_at(tokens, stop_ids), after(q, tokens)
                draft = draw(own, [path for path in shape if len(path) <= room], request).first(most)
                draft = twist(draft, own)
                noise = SeededNoise(request.seed, len(request.tokens))
                verdict = verify(draft, target_rows(after(p, tokens), draft), "rejection", noise)
                tokens += emitted(draft, verdict)
                num_accepted += len(verdict.path)
        return tokens, num_accepted

    return outcome(run, p, length)


P, Q = tables(3, VOCAB, 4), tables(4, VOCAB, 4)
SPARSE = tables(6, VOCAB, 4, holes=0.4)


@pytest.mark.parametrize(("shape", "length"), [(BROAD, 3), (DEEP, 3), (NARROW, 3)], ids=["broad", "deep", "narrow"])
def test_the_law_is_the_target_s(shape, length):
    assert texts(P, Q, shape, length).deviation < 1e-12
    assert texts(P, SPARSE, shape, length).deviation < 1e-12


@pytest.mark.parametrize("most", [1, 2, 3])
def test_so_it_is_where_texts_end_laws_break_and_drafts_are_cut(most):
    broken = lambda path: Q(path) * (math.nan if path[-1:] == (1,) else 1)  # noqa: E731
    assert texts(P, broken, BROAD, 3, stop_ids=[2], most=most).deviation < 1e-12


def test_a_tree_accepts_more_than_a_chain():
    chain = texts(P, Q, [(0,), (0, 0)], 3).accepted
    assert texts(P, Q, BROAD, 3).accepted > chain + 0.1


def plain_laws(draft: Draft, q: Law) -> Draft:
    """Siblings stay in: q itself, as if each had been drawn anew."""
    return dataclasses.replace(draft, probs=torch.stack([q(path[:-1]) for path in draft.paths()]))


def not_renormalised(draft: Draft, q: Law) -> Draft:
    laws = torch.stack([q(path[:-1]) for path in draft.paths()])
    return dataclasses.replace(draft, probs=torch.where(draft.probs > 0, laws, 0.0))


def without_unlikely(draft: Draft, q: Law) -> Draft:
    """Drafts end before a node whose own probability is small."""
    small = [i for i, path in enumerate(draft.paths()) if q(path[:-1])[path[-1]] < 0.3]
    return draft.first(min(small, default=len(draft)))


@pytest.mark.parametrize("twist", [plain_laws, not_renormalised, without_unlikely])
def test_what_is_wrong_is_seen(twist):
    """The controls: each is one of the mistakes that these trees invite."""
    assert texts(P, Q, BROAD, 2, twist=twist).deviation > 1e-3


def test_shared_coins_are_seen(monkeypatch):
    """The control: siblings that are drawn with one number."""
    real = SeededNoise.draw
    monkeypatch.setattr(SeededNoise, "draw", lambda self, depth, q_V, sibling=0: real(self, depth, q_V, 0))
    assert texts(P, Q, BROAD, 2).deviation > 1e-3
