"""What every encoder-decoder family must do on pages: give the stock model's logits, whatever sources share the pass.

Random weights in float64. The oracle is the stock model, run without any cache on one source and one text at a time.
CASES is the list of families: add a line to test another one.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.decoding.draft import ancestors
from pilotfish.decoding.source import Features, Source
from pilotfish.models.encdec import EncoderDecoder
from pilotfish.paged.batch import Feed, lay_out
from tests.contract.test_models import TREE, Run, assert_same, prefixes, text, tree_draft
from tests.models.tiny import sound, tiny_pair

GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "T5": ("t5", {}),
    "T5, tied": ("t5", {"tied": True}),
    "T5 1.1": ("t5", GATED),
    "mT5": ("mt5", GATED),
    "UMT5": ("umt5", GATED),
    "LongT5": ("longt5", GATED | {"local_radius": 4}),
    "BART": ("bart", {}),
    "Marian": ("marian", {}),
    "mBART": ("mbart", {}),
    "Pegasus": ("pegasus", {}),
    "Whisper": ("whisper", {}),
}
SOURCE_A, SOURCE_B = text(13, seed=31), text(4, seed=32)


def sources(case: str) -> tuple[Any, Any]:
    """Two for this family."""
    return (sound(31), sound(32)) if case == "Whisper" else (SOURCE_A, SOURCE_B)


def nearly(source: Any) -> Any:
    """Without the last token; with the last number changed."""
    if not isinstance(source, Features):
        return source[:-1]
    values = source.values.clone()
    values[-1, -1] += 1
    return Features(values)


@functools.cache
def wrapped(case: str) -> EncoderDecoder:
    kind, overrides = CASES[case]
    return EncoderDecoder(tiny_pair(kind, **overrides))


class Oracle:
    """The stock model, in an object of its own, with one source."""

    def __init__(self, case: str, source: Source | Sequence[int]):
        kind, overrides = CASES[case]
        self.model: Any = tiny_pair(kind, **overrides)
        heard = isinstance(source, Features)
        self.source = {"input_features": source.values[None]} if heard else {"input_ids": torch.tensor([source])}

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The logits behind each of these decoder texts, one row per text."""
        with torch.inference_mode():
            rows = [
                self.model(**self.source, decoder_input_ids=torch.tensor([one]), use_cache=False).logits[0, -1]
                for one in texts
            ]
        return torch.stack(rows)


@pytest.fixture(autouse=True)
def _no_float32_inside(monkeypatch: pytest.MonkeyPatch):
    """Eager attention rounds its softmax to float32 in some versions; not what is compared here."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda scores, dim=-1, dtype=None: softmax(scores, dim))


@pytest.mark.parametrize("case", CASES)
def test_prefill_chains_and_trees_of_two_sources_in_shared_passes(case: str):
    source_a, source_b = sources(case)
    run, of_first, of_second = Run(wrapped(case)), Oracle(case, source_a), Oracle(case, source_b)
    a, b = text(9, seed=1), text(5, seed=2)
    run.cache.open("a", a, source_a)
    run.cache.open("b", b, source_b)

    # Both texts begin in one pass, neither is finished.
    rows_a, rows_b = run(run.feed("a", a[:6], num_wanted=2), run.feed("b", b[:4], num_wanted=1))
    assert_same(rows_a, of_first(prefixes(a[:6], 4)))
    assert_same(rows_b, of_second([b[:4]]))
    run.cache.commit("a", range(6), a)
    run.cache.commit("b", range(4), b)

    # The last chunk of one beside the other's pending token and a chain of guesses.
    guesses = text(3, seed=3)
    rows_a, rows_b = run(run.feed("a", a[6:], num_wanted=1), run.feed("b", [b[4], *guesses]))
    assert_same(rows_a, of_first([a]))
    assert_same(rows_b, of_second(prefixes(b + guesses, 4)))
    run.cache.commit("a", range(3), a)
    run.cache.commit("b", [0], b)

    # A tree behind a pending token, beside one plain token.
    a, b = a + text(1, seed=4), b + text(1, seed=5)
    tree = tree_draft(TREE, seed=6)
    rows_a, rows_b = run(run.feed("a", a[-1:], tree), run.feed("b", b[-1:]))
    assert_same(rows_a, of_first([a] + [a + list(path) for path in tree.paths()]))
    assert_same(rows_b, of_second([b]))

    # A path with gaps is kept; rows moved to their places must be as good as fresh ones.
    path = (0, 2, 4, 6)
    a += [tree.tokens[node] for node in path] + text(1, seed=7)
    run.cache.commit("a", [0, *(node + 1 for node in path)], a)
    run.cache.commit("b", [0], b)
    b += text(1, seed=8)
    rows_a, rows_b = run(run.feed("a", a[-1:]), run.feed("b", b[-1:]))
    assert_same(rows_a, of_first([a]))
    assert_same(rows_b, of_second([b]))


@pytest.mark.parametrize("case", ["T5 1.1", "BART"])
def test_a_tree_grown_level_by_level(case: str):
    """Beyond the distance at which buckets end; each pass adds a level behind nodes which earlier passes wrote."""
    run, stock = Run(wrapped(case)), Oracle(case, SOURCE_A)
    prompt = text(20, seed=1)
    tree = tree_draft((-1, -1, 0, 1, 1, 2, 4), seed=2)
    sets, paths = ancestors(tree.parents), tree.paths()
    run.cache.open("a", prompt, SOURCE_A)
    (rows,) = run(run.feed("a", prompt))
    assert_same(rows, stock(prefixes(prompt, 0)))
    run.cache.commit("a", range(len(prompt)), prompt)
    for level in (range(0, 2), range(2, 5), range(5, 7)):
        tokens = [tree.tokens[node] for node in level]
        bits = tuple(sets[node] for node in level)
        (logits,) = run(Feed("a", tokens, len(prompt), len(level), bits, skipped=level.start))
        assert_same(logits, stock([prompt + list(paths[node]) for node in level]))


@pytest.mark.parametrize("case", CASES)
def test_the_source_matters(case: str):
    """Negative control: with another source, or with less of it, the rows are others."""
    one = text(5, seed=1)
    source_a, source_b = sources(case)
    rows = [Oracle(case, source)([one]) for source in (source_a, source_b, nearly(source_a))]
    for other in rows[1:]:
        with pytest.raises(AssertionError):
            assert_same(rows[0], other)


@pytest.mark.parametrize("case", ["T5", "BART", "Whisper"])
def test_pages_are_shared_under_one_source_only(case: str):
    source_a, source_b = sources(case)
    run, of_first, of_second = Run(wrapped(case)), Oracle(case, source_a), Oracle(case, source_b)
    a = text(9, seed=1)
    for name, source, found in (("a", source_a, 0), ("again", source_a, 8), ("b", source_b, 0)):
        assert run.cache.open(name, a, source) == found
        (rows,) = run(run.feed(name, a[found:], num_wanted=1))
        run.cache.commit(name, range(len(a) - found), a)
        assert_same(rows, (of_second if source is source_b else of_first)([a]))


def test_pages_of_another_source_would_be_noticed():
    """Negative control: with the first one's rows, the second text is not what it should be."""
    run, stock = Run(wrapped("T5")), Oracle("T5", SOURCE_B)
    a = text(9, seed=1)
    run.cache.open("a", a, SOURCE_A)
    run(run.feed("a", a))
    run.cache.commit("a", range(9), a)
    entry = run.cache._sequences["a"]
    entry.source = tuple(SOURCE_B)
    entry.length = 8
    run.cache._readings.clear()
    (rows,) = run(run.feed("a", a[8:]))
    with pytest.raises(AssertionError):
        assert_same(rows, stock([a]))


def test_a_source_is_read_once_and_forgotten_with_its_last_sequence():
    model = EncoderDecoder(tiny_pair("t5"))
    reads: list[tuple[int, ...]] = []
    read = model._read
    model._read = lambda source: (reads.append(source), read(source))[1]  # type: ignore[method-assign]
    run, a = Run(model), text(6, seed=1)
    for name in ("a", "b"):
        run.cache.open(name, a, SOURCE_A)
        assert run.cache.was_read(name) == (name == "b")
        run(run.feed(name, a[:3]))
        run.cache.commit(name, range(3), a)
        run(run.feed(name, a[3:]))
    assert reads == [tuple(SOURCE_A)]
    run.cache.release("a")
    assert run.cache.was_read("b") and len(run.cache._readings) == 1
    run.cache.release("b")
    assert not run.cache._readings
    run.cache.check()


@pytest.mark.parametrize("case", ["T5", "Marian", "Whisper"])
def test_some_layers_alone_and_states_that_leave_them(case: str):
    run, (source, _) = Run(wrapped(case)), sources(case)
    a = text(6, seed=1)
    run.cache.open("a", a, source)
    (whole,) = run(run.feed("a", a))
    batch = lay_out([run.feed("a", a)], run.cache)
    part = wrapped(case).forward(batch, run.cache, layers=(0, 2), taps=(2,))
    assert (part.logits_NV - whole).abs().max() > 0.01
    kind, overrides = CASES[case]
    shorter: Any = tiny_pair(kind, **overrides)
    stack = shorter.decoder if case == "T5" else shorter.model.decoder
    name = "block" if case == "T5" else "layers"
    kept = [layer for i, layer in enumerate(getattr(stack, name)) if i != 1]
    setattr(stack, name, torch.nn.ModuleList(kept))
    with torch.inference_mode():
        ids = Oracle(case, source).source | {"decoder_input_ids": torch.tensor([a])}
        stock = shorter(**ids, use_cache=False, output_hidden_states=True)
    assert_same(part.logits_NV, stock.logits[0])
    assert part.taps[2].shape == stock.decoder_hidden_states[-1][0].shape
