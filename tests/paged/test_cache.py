"""The KV cache against a naive model: each row must hold what its own text, and no other, put there."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from pilotfish.decoding.draft import ancestors
from pilotfish.paged.cache import KVCache, LayerShape
from pilotfish.paged.pages import PagePool

LAYERS = (LayerShape(2, 3, 3), LayerShape(2, 3, 3), LayerShape(1, 4, 2))


def cache_of(num_pages: int, page_size: int = 4, **options) -> KVCache:
    return KVCache(LAYERS, num_pages, page_size, dtype=torch.float64, **options)


def write(cache: KVCache, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
    """What a pass does: a row's keys and values are a function of the text up to it."""
    for layer in range(len(cache.layers)):
        for tensor in (cache.keys[layer], cache.values[layer]):
            for slot, text in zip(slots, texts, strict=True):
                tensor[slot] = _value(layer, text)


def content_is(cache: KVCache, sequence: str, tokens: Sequence[int]) -> bool:
    """Whether all committed rows hold what these tokens would have put there."""
    length = cache.length(sequence)
    slots = list(cache.slots(sequence, 0, length))
    for layer in range(len(cache.layers)):
        expected = torch.tensor([_value(layer, tokens[: i + 1]) for i in range(length)], dtype=torch.float64)
        for tensor in (cache.keys[layer], cache.values[layer]):
            if not (tensor[slots].flatten(1) == expected[:, None]).all():
                return False
    return True


def _value(layer: int, text: Sequence[int]) -> float:
    return float(hash((layer, tuple(text))) % 2**40)


class Naive:
    """A user of the cache who keeps the tokens in plain lists and checks everything after every operation."""

    def __init__(self, seed: int, num_pages: int, prefix_sharing: bool = True):
        self.random = random.Random(seed)
        self.cache = cache_of(num_pages, prefix_sharing=prefix_sharing)
        self.tokens: dict[str, list[int]] = {}
        self.num_opened = self.num_hits = self.num_refused = self.num_moved = 0

    def work(self, num_actions: int = 120) -> None:
        for _ in range(num_actions):
            self.act()

    def act(self) -> None:
        action = self.random.choice([self.open, self.step, self.step, self.step, self.step, self.release])
        if self.tokens or action == self.open:
            action()
        self.check()

    def open(self) -> None:
        # Few texts with common beginnings, so that prefixes are met again.
        prompt = [self.random.randrange(2)] * self.random.randrange(1, 10)
        prompt += [self.random.randrange(2) for _ in range(self.random.randrange(5))]
        name = f"sequence {self.num_opened}"
        self.num_opened += 1
        found = self.cache.open(name, prompt)
        self.tokens[name] = prompt
        assert found % self.cache.page_size == 0 and found < len(prompt)
        assert found == self.cache.length(name)
        self.num_hits += found > 0

    def step(self) -> None:
        """The rows still missing and a random tree; a random path of it is kept."""
        name = self.random.choice(list(self.tokens))
        tokens, past = self.tokens[name], self.cache.length(name)
        trunk = len(tokens) - past
        if self.random.random() < 0.3:
            trunk = self.random.randrange(1, trunk + 1)  # a chunk of the prompt
        parents = [self.random.randrange(-1, i) for i in range(self.random.randrange(6))]
        if past + trunk < len(tokens):
            parents = []
        free, short = self.cache.pool.num_free, self.cache.shortfall(name, trunk + len(parents))
        if not self.cache.reserve(name, trunk + len(parents)):
            assert short > free == self.cache.pool.num_free, "refused only for want of pages, and nothing taken"
            self.num_refused += 1
            return
        assert self.cache.pool.num_free == free - short
        guesses = [self.random.randrange(2) for _ in parents]
        paths = [[i for i in range(len(parents)) if bits >> i & 1] for bits in ancestors(tuple(parents))]
        texts = [tokens[: past + i + 1] for i in range(trunk)]
        texts += [tokens + [guesses[i] for i in path] for path in paths]
        write(self.cache, self.cache.slots(name, past, past + trunk + len(parents)), texts)
        self.check()  # not even rows about to be forgotten may touch what others hold
        kept = self.random.choice([[], *paths])
        self.num_moved += kept != list(range(len(kept)))
        tokens += [guesses[i] for i in kept]
        self.cache.commit(name, [*range(trunk), *(trunk + i for i in kept)], tokens)
        if self.cache.length(name) == len(tokens):
            tokens.append(self.random.randrange(2))  # the pending token

    def release(self) -> None:
        name = self.random.choice(list(self.tokens))
        del self.tokens[name]
        self.cache.release(name)
        assert name not in self.cache
        self.cache.release(name)  # released twice is released

    def check(self) -> None:
        self.cache.check()
        assert set(self.cache.sequences) == set(self.tokens)
        for name, tokens in self.tokens.items():
            assert content_is(self.cache, name, tokens), name


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_never_mix_texts_up(seed: int):
    user = Naive(seed, num_pages=9)
    user.work()
    assert user.num_hits and user.num_refused and user.num_moved, "else this seed shows little"
    for name in list(user.tokens):
        user.cache.release(name)
    user.cache.check()
    assert user.cache.pool.num_free == 9 and user.cache.pool.num_held == 0


def test_random_operations_without_sharing():
    user = Naive(seed=7, num_pages=12, prefix_sharing=False)
    user.work()
    assert user.num_opened and not user.num_hits


def test_the_naive_user_would_notice_a_page_written_by_two():
    """Negative control: a pool that hands out pages still held."""
    user = Naive(seed=0, num_pages=12)

    class Careless(PagePool):
        def allocate(self, after: int | None = None) -> int | None:
            return 0 if after != 0 else super().allocate(after)

    user.cache.pool = Careless(12, 4)
    with pytest.raises(AssertionError):
        user.work()


def test_the_naive_user_would_notice_a_path_left_where_it_was(monkeypatch: pytest.MonkeyPatch):
    """Negative control: a commit that does not move kept rows."""
    monkeypatch.setattr(KVCache, "_move", lambda self, entry, kept: None)
    user = Naive(seed=0, num_pages=12)
    with pytest.raises(AssertionError):
        user.work()


def filled(cache: KVCache, sequence: str, tokens: Sequence[int]) -> int:
    """Open, compute and commit all tokens; returns how many rows were found."""
    found = cache.open(sequence, tokens)
    assert cache.reserve(sequence, len(tokens) - found)
    write(cache, cache.slots(sequence, found, len(tokens)), [tokens[: i + 1] for i in range(found, len(tokens))])
    cache.commit(sequence, range(len(tokens) - found), tokens)
    return found


def test_full_pages_are_found_again_but_never_the_last_token():
    cache = cache_of(16)
    text = list(range(12))
    assert filled(cache, "first", text) == 0
    assert cache.open("same", text) == 8, "the last token's logits are wanted, so its page is computed again"
    assert cache.open("longer", [*text, 99]) == 12
    assert cache.open("shorter", text[:11]) == 8
    assert cache.open("another", [*text[:7], 99, *text[8:]]) == 4
    assert cache.open("later", text[4:]) == 0, "the same tokens after others are another text"
    assert cache.pool.num_held == 3
    cache.check()


def test_only_committed_rows_are_shared():
    cache = cache_of(16)
    text = list(range(9))
    cache.open("a", text)
    cache.reserve("a", 9)
    assert cache.open("b", text) == 0, "reserved is not computed"
    cache.commit("a", range(3), text)
    assert cache.open("c", text) == 0, "three rows are no page"
    cache.commit("a", range(3), text)
    assert cache.open("d", text) == 4, "six rows are one"


def test_rejected_rows_are_never_shared():
    cache = cache_of(16)
    text = list(range(7))
    filled(cache, "a", text)
    cache.reserve("a", 6)  # a pending token and five guesses fill the second page and begin a third
    guessed = [*text, 50, 51, 52, 53, 54, 55]
    write(cache, cache.slots("a", 7, 13), [guessed[: i + 1] for i in range(7, 13)])
    cache.commit("a", [0], [*text, 50, 60])
    assert cache.open("b", [*guessed, 56]) == 8
    assert content_is(cache, "b", guessed)
    assert cache.open("c", [*text, 51, 52, 53]) == 4


def test_shared_pages_outlive_who_computed_them():
    cache = cache_of(4)
    text = list(range(9))
    filled(cache, "a", text)
    assert cache.open("b", text) == 8
    cache.release("a")
    assert cache.pool.num_held == 2
    assert filled(cache, "c", [100, 101, 102, 103, 104]) == 0, "takes the rest of the pool"
    assert not cache.reserve("b", 1)
    assert content_is(cache, "b", text)
    cache.release("b")
    assert cache.pool.num_held == 2
    cache.check()


def test_an_evicted_prefix_is_computed_again():
    cache = cache_of(3)
    text = list(range(9))
    filled(cache, "a", text)
    cache.release("a")
    filled(cache, "b", [*range(100, 109)])
    cache.release("b")
    assert filled(cache, "c", text) == 0
    assert content_is(cache, "c", text)


def test_commit_brings_a_path_to_its_place():
    cache = cache_of(8)
    text = [1, 2, 3]
    filled(cache, "a", text)
    cache.reserve("a", 6)
    slots = list(cache.slots("a", 3, 9))
    for layer in range(len(LAYERS)):
        for row, slot in enumerate(slots):
            cache.keys[layer][slot] = 10.0 * row + layer
            cache.values[layer][slot] = -10.0 * row - layer
    cache.commit("a", [0, 2, 5], [1, 2, 3, 4, 5, 6])
    assert cache.length("a") == 6
    for layer in range(len(LAYERS)):
        for place, row in enumerate([0, 2, 5]):
            assert (cache.keys[layer][slots[place]] == 10.0 * row + layer).all()
            assert (cache.values[layer][slots[place]] == -10.0 * row - layer).all()


def test_contiguous_pages_are_read_as_ranges():
    cache = cache_of(8)
    cache.open("a", [0])
    cache.reserve("a", 10)
    assert cache.slots("a", 1, 10) == range(1, 10)
    assert cache.slots("a", 3, 3) == range(0)
    cache.open("b", [0])
    cache.reserve("b", 4)  # takes the page behind a's
    cache.reserve("a", 20)
    pages = cache._sequences["a"].pages
    assert any(right != left + 1 for left, right in pairwise(pages))
    slots = cache.slots("a", 0, 20)
    assert slots == [pages[i // 4] * 4 + i % 4 for i in range(20)]
    assert cache.slots("a", 2, 9) == range(slots[2], slots[2] + 7), "a part may lie side by side"


def test_a_reservation_is_not_made_twice():
    cache = cache_of(4)
    cache.open("a", [0])
    assert cache.shortfall("a", 5) == 2
    assert cache.reserve("a", 5) and cache.reserve("a", 8)
    assert cache.shortfall("a", 8) == 0 and cache.shortfall("a", 9) == 1
    assert cache.pool.num_held == 2
    assert not cache.reserve("a", 17)
    assert cache.pool.num_held == 2


def test_sizes():
    cache = cache_of(6)
    assert cache.capacity == 24
    assert cache.bytes_per_token == 8 * (2 * (3 + 3) + 2 * (3 + 3) + 1 * (4 + 2))
    assert [tuple(keys.shape) for keys in cache.keys] == [(24, 2, 3), (24, 2, 3), (24, 1, 4)]
    assert [tuple(values.shape) for values in cache.values] == [(24, 2, 3), (24, 2, 3), (24, 1, 2)]


def test_our_own_mistakes_are_noticed():
    cache = cache_of(4)
    cache.open("a", [1, 2])
    with pytest.raises(AssertionError, match="open already"):
        cache.open("a", [1, 2])
    cache.reserve("a", 4)
    with pytest.raises(AssertionError):
        cache.commit("a", range(3), [1, 2])  # more rows than the text has tokens
