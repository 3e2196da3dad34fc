"""Sequences with sources in the cache: what is shared, what is kept, and what goes with the last of them."""

import pytest
import torch

from pilotfish.decoding.source import Features
from tests.paged.test_cache import cache_of

TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def filled(cache, name, source=()):
    found = cache.open(name, TEXT, source)
    assert cache.reserve(name, len(TEXT) - found)
    cache.commit(name, range(len(TEXT) - found), TEXT)
    cache.check()
    return found


def test_pages_are_known_by_their_source_too():
    cache = cache_of(16)
    cases = (("a", [7, 7]), ("b", [7, 8]), ("c", []), ("d", [7, 7]), ("e", [7, 7, 7]))
    assert [filled(cache, *case) for case in cases] == [0, 0, 0, 8, 0]
    for name in "abcde":
        cache.release(name)
    assert filled(cache, "f", [7, 8]) == filled(cache, "g") == 8, "known pages outlive their sequences"
    assert cache.pool.num_held == 6


@pytest.mark.parametrize("source", [(0,), (1,), (2,)])
def test_a_source_is_not_taken_for_a_page_s_number(source):
    """The first page's number is 1; the text of that page followed by itself is no text of source (1,)."""
    cache = cache_of(16)
    cache.open("a", [1, 2, 3, 4] * 2)
    cache.reserve("a", 8)
    cache.commit("a", range(8), [1, 2, 3, 4] * 2)
    assert cache.open("b", [1, 2, 3, 4] * 2, source) == 0


def test_what_was_read_goes_with_the_last_sequence():
    cache, reads = cache_of(16), []

    def read(source):
        reads.append(source)
        return object()

    filled(cache, "a", [1, 2])
    filled(cache, "b", [1, 2])
    filled(cache, "c", [3])
    assert not cache.was_read("a")
    first = cache.reading("a", read)
    assert cache.reading("b", read) is cache.reading("a", read) is first
    assert cache.was_read("b") and not cache.was_read("c")
    assert cache.reading("c", read) is not first
    cache.release("a")
    assert cache.reading("b", read) is first
    cache.release("b")
    cache.check()
    filled(cache, "a", [1, 2])
    assert not cache.was_read("a") and cache.was_read("c")
    cache.reading("a", read)
    assert reads == [(1, 2), (3,), (1, 2)]


def test_features_are_known_by_every_bit():
    values = torch.arange(6.0).reshape(2, 3)
    other = values.clone()
    other[0, 0] = -0.0
    one, twin, last = Features(values), Features(values.clone()), Features(other)
    cache, reads = cache_of(16), []
    assert [filled(cache, *case) for case in (("a", one), ("b", last), ("c", twin), ("d", [7]))] == [0, 0, 8, 0]
    assert cache.open("e", TEXT, one, "law") == 0, "nor are they shared with an adapter's"
    made = {name: cache.reading(name, lambda source: reads.append(source) or object()) for name in "abce"}
    assert reads == [one, last, one] and made["a"] is made["c"] is not made["e"]
    assert cache.source("c") == one and cache.was_read("c")
    cache.check()
    for name in "abcde":
        cache.release(name)
    assert not cache._readings and filled(cache, "f", twin) == 8


def test_a_sequence_without_a_source_has_nothing_to_read():
    cache = cache_of(4)
    cache.open("a", TEXT)
    assert cache.source("a") == () and cache.was_read("a")
    with pytest.raises(AssertionError, match="a has no source"):
        cache.reading("a", list)


def test_a_reading_left_behind_is_noticed():
    """Negative control of `check`."""
    cache = cache_of(4)
    cache.open("a", TEXT, [5])
    cache.reading("a", list)
    cache._sequences["a"].source = ()
    with pytest.raises(AssertionError, match="a reading that nobody needs"):
        cache.check()
