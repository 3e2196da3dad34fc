"""What every Hugging Face architecture must do on pages: give the logits of the stock model, whatever shares the pass.

Random weights in float64, so that rounding cannot hide a mistake. The oracle is the stock model, run without any cache
over one plain text at a time. CASES is the list of architectures: add a line to test another one.
"""

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pilotfish.decoding.draft import Draft, ancestors
from pilotfish.models.base import CausalLM
from pilotfish.models.huggingface import HuggingFaceLM
from pilotfish.paged.batch import Feed, lay_out
from tests.models.tiny import VOCAB_SIZE, tiny_model

CASES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2 with a window it does not use": ("qwen2", {"use_sliding_window": False, "sliding_window": 6}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma4_text": ("gemma4_text", {}),
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "gpt_oss": ("gpt_oss", {}),
    "starcoder2": ("starcoder2", {}),
    "cohere": ("cohere", {}),
    "deepseek_v3": ("deepseek_v3", {}),
}
WINDOW = 6
WINDOWED = ["qwen2 with a window", "mistral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"]
# Its router computes in float32 in any dtype, and how a product is rounded depends on how many rows it has.
ROUNDS = {"deepseek_v3": 1e-6}
TREE = (-1, -1, 0, 0, 2, 1, 4)


@functools.cache
def wrapped(case: str) -> HuggingFaceLM:
    kind, overrides = CASES[case]
    return HuggingFaceLM(tiny_model(kind, **overrides))


class Oracle:
    """The stock model, in an object of its own that our attention never touched."""

    def __init__(self, case: str):
        kind, overrides = CASES[case]
        self.model = tiny_model(kind, **overrides)

    def __call__(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The logits behind each of these texts, one row per text."""
        with torch.inference_mode():
            rows = [self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts]
        return torch.stack(rows)


@functools.cache
def oracle(case: str) -> Oracle:
    return Oracle(case)


class Run:
    """A model and a cache, fed by hand."""

    def __init__(self, model: CausalLM, page_size: int = 4):
        self.model, self.cache = model, model.new_cache(64, page_size)

    def __call__(self, *feeds: Feed) -> list[Tensor]:
        """One pass; per feed the logits of its wanted rows."""
        for feed in feeds:
            assert self.cache.reserve(feed.sequence, feed.num_keys - self.cache.length(feed.sequence))
        logits_NV = self.model.forward(lay_out(feeds, self.cache), self.cache).logits_NV
        self.cache.check()
        return list(logits_NV.split([feed.num_wanted for feed in feeds]))

    def feed(
        self, sequence: str, tokens: Sequence[int], tree: Draft | None = None, num_wanted: int | None = None
    ) -> Feed:
        """Rows behind what the cache has: tokens in a chain, then a tree if there is one."""
        rows = [*tokens, *(tree.tokens if tree else ())]
        sets = ancestors(tree.parents) if tree else ()
        return Feed(sequence, rows, self.cache.length(sequence), len(rows) if num_wanted is None else num_wanted, sets)


@pytest.fixture(autouse=True)
def _no_float32_inside(monkeypatch: pytest.MonkeyPatch):
    """Eager attention rounds its softmax to float32 whatever the model's dtype is; not what is compared here."""
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda scores, dim=-1, dtype=None: softmax(scores, dim))


def text(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tree_draft(parents: Sequence[int], seed: int) -> Draft:
    return Draft(tuple(text(len(parents), seed)), tuple(parents))


def prefixes(tokens: Sequence[int], start: int) -> list[list[int]]:
    """The texts that end at each row from ``start`` on."""
    return [list(tokens[: i + 1]) for i in range(start, len(tokens))]


def assert_same(ours: Tensor, stock: Tensor, case: str = "") -> None:
    assert ours.shape == stock.shape
    error = float((ours - stock).abs().max() / stock.abs().max())
    assert error < ROUNDS.get(case, 1e-9), error


@pytest.mark.parametrize("case", CASES)
def test_prefill_chains_and_trees_of_two_sequences_in_shared_passes(case: str):
    run, stock = Run(wrapped(case)), oracle(case)
    a, b = text(9, seed=1), text(5, seed=2)
    run.cache.open("a", a)
    run.cache.open("b", b)

    # Both prompts begin in one pass, neither is finished.
    of_a, of_b = run(run.feed("a", a[:6], num_wanted=2), run.feed("b", b[:4], num_wanted=1))
    assert_same(of_a, stock(prefixes(a[:6], 4)), case)
    assert_same(of_b, stock([b[:4]]), case)
    run.cache.commit("a", range(6), a)
    run.cache.commit("b", range(4), b)

    # The last chunk of one prompt beside the other's pending token and a chain of guesses.
    guesses = text(3, seed=3)
    of_a, of_b = run(run.feed("a", a[6:], num_wanted=1), run.feed("b", [b[4], *guesses]))
    assert_same(of_a, stock([a]), case)
    assert_same(of_b, stock(prefixes(b + guesses, 4)), case)
    run.cache.commit("a", range(3), a)
    run.cache.commit("b", [0], b)  # all guesses rejected

    # A tree behind a pending token, beside one plain token.
    a += text(1, seed=4)
    b += text(1, seed=5)
    tree = tree_draft(TREE, seed=6)
    of_a, of_b = run(run.feed("a", a[-1:], tree), run.feed("b", b[-1:]))
    assert_same(of_a, stock([a] + [a + list(path) for path in tree.paths()]), case)
    assert_same(of_b, stock([b]), case)

    # A path with gaps is kept; the rows moved to their places must be as good as fresh ones.
    path = (0, 2, 4, 6)
    a += [tree.tokens[node] for node in path] + text(1, seed=7)
    run.cache.commit("a", [0, *(node + 1 for node in path)], a)
    run.cache.commit("b", [0], b)
    b += text(1, seed=8)
    of_a, of_b = run(run.feed("a", a[-1:]), run.feed("b", b[-1:]))
    assert_same(of_a, stock([a]), case)
    assert_same(of_b, stock([b]), case)


@pytest.mark.parametrize("case", CASES)
def test_a_tree_grown_level_by_level(case: str):
    """How a draft model drafts a tree: each pass adds a level behind nodes which earlier passes wrote."""
    run, stock = Run(wrapped(case)), oracle(case)
    prompt = text(8, seed=1)
    tree = tree_draft((-1, -1, 0, 1, 1, 2, 4), seed=2)
    levels = [range(0, 2), range(2, 5), range(5, 7)]
    sets, paths = ancestors(tree.parents), tree.paths()
    run.cache.open("a", prompt)
    run(run.feed("a", prompt))
    run.cache.commit("a", range(len(prompt)), prompt)
    for level in levels:
        tokens = [tree.tokens[node] for node in level]
        bits = tuple(sets[node] for node in level)
        (logits,) = run(Feed("a", tokens, len(prompt), len(level), bits, skipped=level.start))
        assert_same(logits, stock([prompt + list(paths[node]) for node in level]), case)


@pytest.mark.parametrize("case", WINDOWED)
@pytest.mark.parametrize("length", range(WINDOW - 1, WINDOW + 6))
def test_the_edges_of_a_window(case: str, length: int):
    """Prompts around the window's length, each with a chain and with a tree that grow across its edge."""
    run, stock = Run(wrapped(case)), oracle(case)
    a = text(length, seed=length)
    for name in ("chain", "tree"):
        run.cache.open(name, a)
    chunk = run.feed("chain", a[:-1], num_wanted=1), run.feed("tree", a[:-1], num_wanted=0)
    (of_chunk, _) = run(*chunk)
    assert_same(of_chunk, stock([a[:-1]]), case)
    for name in ("chain", "tree"):
        run.cache.commit(name, range(length - 1), a)
    guesses, tree = text(3, seed=20), tree_draft(TREE, seed=21)
    of_chain, of_tree = run(run.feed("chain", [a[-1], *guesses]), run.feed("tree", a[-1:], tree))
    assert_same(of_chain, stock(prefixes(a + guesses, length - 1)), case)
    assert_same(of_tree, stock([a] + [a + list(path) for path in tree.paths()]), case)


@pytest.mark.parametrize("case", WINDOWED)
def test_the_windows_of_these_cases_matter(case: str):
    """Negative control: without its window the model would say something else."""
    kind, overrides = CASES[case]
    wide = tiny_model(kind, **overrides | {"sliding_window": 100})
    long = torch.tensor([text(12, seed=1)])
    with torch.inference_mode():
        difference = wide(input_ids=long).logits[0, -1] - oracle(case).model(input_ids=long).logits[0, -1]
    assert difference.abs().max() > 0.01


def test_the_comparison_can_fail():
    """Negative control: a row that sees one key too few is far outside the tolerance."""
    run, stock = Run(wrapped("llama")), oracle("llama")
    a = text(6, seed=1)
    run.cache.open("a", a)
    run(run.feed("a", a[:4]))
    run.cache.commit("a", range(3), a)  # one row less than was computed
    (logits,) = run(Feed("a", a[4:5], 3, 1))
    with pytest.raises(AssertionError):
        assert_same(logits, stock([a[:5]]))
