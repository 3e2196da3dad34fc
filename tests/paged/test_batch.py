"""Host lists as tensors: positions, slots and masks of ragged feeds, against a plain definition of who sees whom."""

import random

import pytest
import torch

from pilotfish.paged.batch import Batch, Feed, lay_out
from pilotfish.paged.cache import KVCache, LayerShape
from tests.paged.ragged import Case, plain, random_case, reserve, tree

WINDOWS = (None, 1, 2, 3, 7, 100)


def laid_out(*cases: Case, page_size: int = 4) -> tuple[Batch, KVCache]:
    cache = KVCache([LayerShape(1, 1, 1)], 64, page_size)
    reserve(cache, cases)
    return lay_out([case.feed for case in cases], cache), cache


def flat(index: slice | torch.Tensor) -> list[int]:
    return list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()


def assert_masks_are_right(batch: Batch, cases: list[Case]) -> None:
    for span, case in zip(batch.spans, cases, strict=True):
        keys = case.feed.num_keys
        for window in WINDOWS:
            expected = torch.zeros(len(case.feed.tokens), keys, dtype=torch.bool)
            for row in range(len(expected)):
                expected[row, case.visible(row, window)] = True
            mask = span.mask(window)
            seen = torch.ones_like(expected) if mask is None else mask
            assert torch.equal(seen, expected), (case, window)


@pytest.mark.parametrize("seed", range(40))
def test_random_feeds(seed: int):
    source = random.Random(seed)
    cases = [random_case(str(i), source) for i in range(source.randrange(1, 5))]
    batch, cache = laid_out(*cases)
    assert batch.num_rows == len(batch.tokens_T) == sum(len(case.feed.tokens) for case in cases)
    assert len(batch) == len(cases)
    written, start = flat(batch.slots_T), 0
    for span, case in zip(batch.spans, cases, strict=True):
        stop = start + len(case.feed.tokens)
        assert (span.start, span.stop) == (start, stop)
        own = [case.key_of(row) for row in range(stop - start)]
        slots = list(cache.slots(case.feed.sequence, 0, case.feed.num_keys))
        assert flat(span.key_slots) == slots
        assert written[start:stop] == [slots[key] for key in own]
        assert batch.tokens_T[start:stop].tolist() == list(case.feed.tokens)
        assert batch.positions_T[start:stop].tolist() == [case.position(key) for key in own]
        start = stop
    assert_masks_are_right(batch, cases)


def test_a_prompt_and_its_second_chunk():
    batch, _ = laid_out(plain("a", [7, 8, 9], 0), plain("b", [5, 6], 3, num_wanted=1))
    assert batch.tokens_T.tolist() == [7, 8, 9, 5, 6]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert batch.wanted_N.tolist() == [0, 1, 2, 4]
    assert batch.spans[0].mask(None).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert batch.spans[1].mask(None).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.spans[1].mask(2).tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_a_tree_behind_a_pending_token():
    """The drawing:  pending ── 0 ── 1,  pending ── 2."""
    batch, _ = laid_out(tree("a", [-1, 0, -1], 2))
    assert batch.positions_T.tolist() == [2, 3, 4, 3]
    assert batch.spans[0].mask(None).tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    assert batch.spans[0].mask(2).tolist() == [
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 1, 0, 0, 1],
    ]


def test_a_level_behind_nodes_of_earlier_passes():
    batch, cache = laid_out(tree("a", [-1, -1, 1, 1], 5, num_trunk=0, skipped=2))
    assert batch.positions_T.tolist() == [6, 6]
    assert flat(batch.slots_T) == list(cache.slots("a", 7, 9))
    assert batch.spans[0].mask(None).tolist() == [[1] * 5 + [0, 1, 1, 0], [1] * 5 + [0, 1, 0, 1]]


def test_a_level_lies_right_behind_the_trunk():
    case = Case(Feed("a", [1, 2], past=3, num_wanted=1, ancestors=(2,), skipped=1), (-1, -1))
    with pytest.raises(AssertionError, match="no new trunk"):
        laid_out(case)


def test_one_row_that_sees_everything_needs_no_mask():
    last_level = tree("c", [-1, 0, 1], 4, num_trunk=0, skipped=2)
    batch, _ = laid_out(plain("a", [1], 9), tree("b", [-1], 4, num_trunk=0), last_level)
    assert [span.mask(None) for span in batch.spans] == [None, None, None]
    assert batch.spans[0].mask(10) is None and batch.spans[0].mask(9) is not None


def test_masks_are_built_once():
    batch, _ = laid_out(plain("a", [1, 2, 3], 0))
    assert batch.spans[0].mask(2) is batch.spans[0].mask(2)
    assert batch.spans[0].mask(2) is not batch.spans[0].mask(3)


def test_pages_side_by_side_are_read_as_views():
    batch, _ = laid_out(plain("a", [1, 2], 9))
    assert batch.spans[0].key_slots == slice(0, 11) and batch.slots_T == slice(9, 11)
    batch, _ = laid_out(plain("a", [1, 2], 9), plain("b", [1], 9))
    assert isinstance(batch.spans[0].key_slots, torch.Tensor), "interleaved pages are gathered"


def test_nothing_may_be_wanted():
    batch, _ = laid_out(plain("a", [1, 2], 0, num_wanted=0))
    assert batch.wanted_N.tolist() == [] and batch.wanted_N.dtype == torch.int64


def test_the_plain_definition_can_disagree():
    """Negative control: an ancestor set with one bit too many, and a window off by one."""
    case = tree("a", [-1, 0, -1], 4)
    first, *others = case.feed.ancestors
    wrong = Feed("a", case.feed.tokens, 4, 4, (first, others[0], others[1] | 1))
    batch, _ = laid_out(Case(wrong, case.parents))
    with pytest.raises(AssertionError):
        assert_masks_are_right(batch, [case])
    assert case.visible(0, 2) != case.visible(0, 3)
