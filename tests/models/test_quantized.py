"""The quantised decoder: the same bits in any company, close to float, and honest about broken rows."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from pilotfish.attention.compiled import BLOCK
from pilotfish.models.decoder import Decoder
from pilotfish.models.quantize import quantise
from pilotfish.models.quantized import QuantizedDecoder
from pilotfish.paged.batch import Feed, lay_out
from pilotfish.paged.cache import KVCache

from .tiny import VOCAB_SIZE, tiny_model

SHAPE: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 112, "max_position_embeddings": 1024}
LONG = [(31 * i * i + 7 * i + 3) % VOCAB_SIZE for i in range(2 * BLOCK + 40)]


def quantised(kind: str = "llama", bits: int = 8, **overrides: Any) -> QuantizedDecoder:
    return QuantizedDecoder(quantise(tiny_model(kind, dtype=torch.float32, **SHAPE | overrides), bits), kind)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def begun(lm: Any, num: int, chunk: int = 1000, name: str = "a", cache: KVCache | None = None) -> KVCache:
    """A cache that has read the first ``num`` tokens of LONG, ``chunk`` at a time."""
    cache = cache or lm.new_cache(64)
    cache.open(name, [])
    assert cache.reserve(name, num + 24)
    for start in range(0, num, chunk):
        lm.forward(lay_out([Feed(name, LONG[start : min(num, start + chunk)], start, 0)], cache), cache)
    cache.commit(name, range(num), LONG)
    return cache


def logits(lm: Any, cache: KVCache, tokens: Sequence[int], past: int, **tree: Any) -> torch.Tensor:
    return lm.forward(lay_out([Feed("a", tokens, past, len(tokens), **tree)], cache), cache).logits_NV


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_close_to_float(kind: str) -> None:
    model = tiny_model(kind, dtype=torch.float32, **SHAPE)
    exact, ours = Decoder(model), QuantizedDecoder(quantise(model, 8), kind)
    one, other = (logits(lm, begun(lm, 30), LONG[30:40], 30) for lm in (exact, ours))
    error = float((one - other).norm() / one.norm())
    assert error < 0.25  # tiny random models amplify
    shuffled = logits(ours, begun(ours, 29), LONG[30:40], 29)
    assert float((one - shuffled).norm() / one.norm()) > 2 * error  # one token less of context is seen


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("past", [5, BLOCK - 2, 2 * BLOCK + 7])
def test_a_row_is_bitwise_the_same_in_any_company(kind: str, bits: int, past: int) -> None:
    lm = quantised(kind, bits)
    assert lm.info.bitwise
    cache = begun(lm, past)
    tokens = LONG[past : past + 9]
    alone = torch.cat([logits(lm, cache, [token], past + i) for i, token in enumerate(tokens)])
    assert torch.equal(logits(lm, cache, tokens, past), alone)  # as one chunk
    # In another cache, in small chunks, beside other sequences whose pages lie between its own.
    other = lm.new_cache(128, 4)
    begun(lm, 3, name="x", cache=other)
    begun(lm, past, chunk=7, cache=other)
    feeds = [Feed("x", LONG[50:53], 3, 1), Feed("a", tokens, past, 9)]
    assert torch.equal(lm.forward(lay_out(feeds, other), other).logits_NV[1:], alone)
    # As the deep path of a tree whose siblings lie in between.
    nodes, ancestors, place = [], [], []
    own = 0
    for token in tokens[1:]:
        nodes += [(token + 1) % VOCAB_SIZE, token]
        number = len(nodes)
        ancestors += [own | 1 << number - 2, own | 1 << number - 1]
        own |= 1 << number - 1
        place.append(number)
    tree = logits(lm, cache, tokens[:1] + nodes, past, ancestors=tuple(ancestors))
    assert torch.equal(tree[[0, *place]], alone)
    assert not torch.equal(tree[place[0] - 1], alone[1])  # the sibling is another token


def test_threads_and_the_order_of_pages_change_nothing(threads: None) -> None:
    results = []
    lm = quantised()  # one model for all: what it keeps between passes must fit any number of threads
    for num in (1, 2, 3):
        torch.set_num_threads(num)
        results.append(logits(lm, begun(lm, 2 * BLOCK, chunk=50), LONG[2 * BLOCK : 2 * BLOCK + 20], 2 * BLOCK))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_float_attention_is_not_bitwise_which_is_why_this_one_is_tested() -> None:
    lm = Decoder(tiny_model(dtype=torch.float32, **SHAPE))
    assert not lm.info.bitwise
    cache = begun(lm, 2 * BLOCK)
    tokens = LONG[2 * BLOCK : 2 * BLOCK + 16]
    alone = torch.cat([logits(lm, cache, [token], 2 * BLOCK + i) for i, token in enumerate(tokens)])
    together = logits(lm, cache, tokens, 2 * BLOCK)
    assert torch.allclose(together, alone, atol=1e-3) and not torch.equal(together, alone)


def test_garbage_behind_the_text_is_never_read_into_it() -> None:
    lm = quantised()
    clean, dirty = lm.new_cache(64), lm.new_cache(64)
    for tensor in (*dirty.keys, *dirty.values):
        tensor.fill_(float("nan"))
    one, other = (logits(lm, begun(lm, 37, cache=cache), LONG[37:41], 37) for cache in (clean, dirty))
    assert torch.equal(one, other)


def test_taps_and_single_layers() -> None:
    model = tiny_model(dtype=torch.float32, **SHAPE)
    lm, exact = QuantizedDecoder(quantise(model, 8), "x"), Decoder(model)
    outputs = []
    for decoder in (lm, exact):
        cache = begun(decoder, 12)
        assert cache.reserve("a", 300)
        batch = lay_out([Feed("a", LONG[12:290], 12, 1)], cache)
        outputs.append(decoder.forward(batch, cache, taps=(0, 2)))
        part = decoder.forward(batch, cache, layers=(0, 2))
        assert part.logits_NV.shape == (1, VOCAB_SIZE)
        assert not torch.equal(part.logits_NV, outputs[-1].logits_NV)
    for layer in (0, 2):
        ours, wanted = outputs[0].taps[layer], outputs[1].taps[layer]
        assert ours.shape == wanted.shape == (278, 64)
        assert float((ours - wanted).norm() / wanted.norm()) < 0.25


def test_threads_that_share_a_model_wait_for_each_other() -> None:
    """Each with a cache of its own; the buffers of a pass are the model's."""
    lm = quantised()
    caches = [begun(lm, past) for past in (20, 60, 90)]
    expected = [logits(lm, cache, LONG[:5], past) for cache, past in zip(caches, (20, 60, 90), strict=True)]
    wrong: list[int] = []

    def check(which: int) -> None:
        for _ in range(60):
            found = logits(lm, caches[which], LONG[:5], (20, 60, 90)[which])
            wrong.extend([which] * (not torch.equal(found, expected[which])))

    checkers = [threading.Thread(target=check, args=(which,)) for which in range(3)]
    for checker in checkers:
        checker.start()
    for checker in checkers:
        checker.join()
    assert not wrong


def test_ctrl_c_while_rotations_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model goes on afterwards, as a chat does."""
    lm = quantised()
    cache = begun(lm, 5)
    right = logits(lm, cache, LONG[5:9], 5)

    def interrupted(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cos", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lm._grow_turns(2000)
    assert torch.equal(logits(lm, cache, LONG[5:9], 5), right)
