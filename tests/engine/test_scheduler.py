"""The scheduler alone: who gets rows, who waits, who gives pages back. No model; rows are committed by hand."""

from collections.abc import Sequence

import pytest

from pilotfish.decoding.draft import Draft, chain
from pilotfish.decoding.request import Request
from pilotfish.decoding.sampling import SamplingParams
from pilotfish.engine.options import EngineOptions
from pilotfish.engine.scheduler import Entry, Plan, Scheduler
from pilotfish.errors import CapacityError
from pilotfish.paged.cache import KVCache


class Board:
    """A scheduler, and a target that says 0 to everything and accepts nothing."""

    def __init__(self, k: int = 0, **options: int):
        self.options = EngineOptions(**{"block_size": 4, "num_pages": 100} | options)
        self.cache = KVCache((), self.options.num_pages, self.options.block_size, prefix_sharing=False)
        self.scheduler = Scheduler(self.cache, self.options, lambda requests: [k] * len(requests))

    def add(self, name: str, num_prompt: int, max_tokens: int = 8) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(name, (1,) * num_prompt, params, seed=0, rule="rejection", max_length=10_000)
        self.scheduler.add(request)
        return request

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        assert sum(e.num_trunk + e.limit for e in plan.entries) <= self.options.max_num_batched_tokens
        assert len({e.request.id for e in plan.entries}) == len(plan.entries)
        for entry in plan.entries:
            request = entry.request
            if entry.caught_up:
                request.tokens.append(0)
            self.cache.commit(request.id, range(entry.num_trunk), request.tokens)
            if request.room <= 0:
                self.scheduler.remove(request)
        self.scheduler.check()
        return plan

    def rows(self) -> list[tuple[str, int, int]]:
        return [(e.request.id, e.num_trunk, e.limit) for e in self.step().entries]


def test_a_prompt_goes_in_chunks_and_then_token_by_token():
    board = Board(k=2, max_num_batched_tokens=8, max_num_seqs=2)
    board.add("a", 19, max_tokens=4)
    assert [board.rows() for _ in range(7)] == [
        [("a", 8, 0)],
        [("a", 8, 0)],
        [("a", 3, 2)],  # the last of the prompt, and already a draft
        [("a", 1, 2)],
        [("a", 1, 1)],  # room for one more than the pass itself adds
        [("a", 1, 0)],
        [],
    ]


def test_arrivals_join_while_there_are_rows_and_seats():
    board = Board(max_num_batched_tokens=10, max_num_seqs=2)
    for name in "abc":
        board.add(name, 6, max_tokens=3)
    assert board.rows() == [("a", 6, 0), ("b", 4, 0)]
    assert board.rows() == [("a", 1, 0), ("b", 2, 0)]
    assert board.rows() == [("a", 1, 0), ("b", 1, 0)]
    assert board.rows() == [("b", 1, 0), ("c", 6, 0)]


@pytest.mark.parametrize("num_rows", [4, 5, 8, 11])
def test_whatever_the_first_ones_draft_everybody_gets_a_row(num_rows):
    """max_num_batched_tokens is at least max_num_seqs so that every request gets on in every pass."""
    board = Board(k=8, max_num_batched_tokens=num_rows, max_num_seqs=4)
    requests = [board.add(name, 1, max_tokens=30) for name in "abcd"]
    while len(board.scheduler.running) < 4:
        board.step()
    for _ in range(6):
        before = [r.num_output for r in requests]
        board.step()
        assert [r.num_output for r in requests] == [n + 1 for n in before]


def test_a_long_prompt_does_not_stop_those_that_came_with_it():
    board = Board(max_num_batched_tokens=8, max_num_seqs=4, num_pages=60)
    short = board.add("a", 2, max_tokens=20)
    board.step()
    board.add("b", 100)
    board.step()
    board.scheduler.running.reverse()  # as after a preemption: the long one is first in line
    board.step()
    assert short.num_output == 3


def test_drafts_shrink_to_nothing_before_anybody_is_preempted():
    board = Board(k=6, num_pages=4, max_num_seqs=2)
    board.add("a", 5, max_tokens=8)
    board.add("b", 3, max_tokens=4)
    assert board.rows() == [("a", 5, 6), ("b", 3, 0)]
    assert board.rows() == [("a", 1, 6), ("b", 1, 0)]
    assert board.scheduler.num_preemptions == 0


def test_the_youngest_gives_way_and_comes_back_first():
    board = Board(num_pages=6, max_num_seqs=3)
    oldest, middle, youngest = (board.add(name, 7, max_tokens=17) for name in "abc")
    board.step()
    while not board.scheduler.num_preemptions:
        board.step()
    assert board.scheduler.running == [oldest, middle]
    assert list(board.scheduler.waiting) == [youngest]
    late = board.add("d", 1)
    back: list[Request] = []
    while len(board.scheduler):
        board.step()
        back += [r for r in board.scheduler.running if r in (youngest, late) and r not in back]
    assert back == [youngest, late]
    assert all(r.num_output == r.params.max_tokens for r in (oldest, middle, youngest, late))
    assert board.cache.pool.num_held == 0


def test_the_oldest_gets_on_in_every_pass():
    board = Board(num_pages=8, max_num_seqs=8)
    requests = [board.add(str(i), 3 + 3 * i, max_tokens=10) for i in range(7)]
    while len(board.scheduler):
        oldest = min((r for r in requests if r.room > 0), key=requests.index)
        before = oldest.num_output
        board.step()
        assert oldest.num_output == before + 1
    assert board.scheduler.num_preemptions > 0


def test_what_could_never_fit_is_refused_at_once():
    board = Board(num_pages=4)
    board.add("fits", 10, max_tokens=6)
    with pytest.raises(CapacityError, match="10 tokens and max_tokens 7 need 17 rows, and the page pool holds 16"):
        board.add("does not", 10, max_tokens=7)
    assert len(board.scheduler) == 1


def test_removing_works_wherever_a_request_is():
    board = Board(max_num_seqs=1)
    running, waiting = board.add("a", 3), board.add("b", 3)
    board.step()
    for request in (waiting, running, running):
        board.scheduler.remove(request)
    assert len(board.scheduler) == 0 and board.cache.pool.num_held == 0


def rows(num_tokens: int, draft: Draft, past: int, num_trunk: int) -> tuple[list[int], int, int, Sequence[int]]:
    request = Request("a", tuple(range(num_tokens)), SamplingParams(), seed=0, rule="rejection", max_length=99)
    feed = Entry(request, past, num_trunk).feed(draft)
    return list(feed.tokens), feed.num_trunk, feed.num_wanted, feed.ancestors


def test_the_rows_of_an_entry():
    assert rows(5, chain([7, 8]), 4, 1) == ([4, 7, 8], 3, 3, ())  # a chain prolongs the trunk
    assert rows(5, Draft((7, 8), (-1, -1)), 3, 2) == ([3, 4, 7, 8], 2, 3, (1, 2))
    assert rows(5, Draft(), 4, 1) == ([4], 1, 1, ())
    assert rows(5, Draft(), 1, 2) == ([1, 2], 2, 0, ())  # a chunk: nothing is wanted
