"""Two implementations of one step: the head's own torch code, and the compiled loops of quantised models."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pilotfish.heads.eagle3 import Eagle3Config, Eagle3Head
from pilotfish.heads.layers import packed
from pilotfish.heads.stepping import Steps, compiled
from pilotfish.paged.batch import Feed, lay_out
from pilotfish.paged.cache import KVCache, LayerShape

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 112, "num_heads": 4, "num_key_heads": 2, "head_dim": 32, "vocab_size": 50,
    "draft_vocab_size": 40, "taps": (0, 1, 2),
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [{}, {"norm_before_residual": True}, {"norm_output": True}, {"qk_norm": True}]


def head_of(bits: int = 8, **variant: Any) -> Eagle3Head:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        table = torch.randn(50, 64)
        head = Eagle3Head(Eagle3Config(**SIZES | variant), lambda tokens: table[tokens], range(5, 45))
        for name, parameter in head.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    head.requires_grad_(False)
    if bits:
        packed(head, bits)
    return head


def by_torch(head: Eagle3Head) -> Steps:
    steps = Steps(head)
    steps.native = None
    return steps


def cache_of(*sequences: str) -> KVCache:
    cache = KVCache([LayerShape(2, 32, 32)], 40, 4)
    for name in sequences:
        cache.open(name, [])
        cache.reserve(name, 60)
    return cache


def states(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def passes() -> list[list[Feed]]:
    """A prompt and a short text; then a chain's row beside two levels of a tree, the second behind the first."""
    tree = Feed("b", [9, 8, 7], 3, 3, (1, 2, 4))
    deeper = Feed("b", [6, 5], 3, 2, (0b01001, 0b10010), 3)
    return [
        [Feed("a", list(range(30)), 0, 1), Feed("b", [1, 2, 3], 0, 3)],
        [Feed("a", [4], 30, 1), tree],
        [deeper],
    ]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_both_give_the_same(variant: dict[str, Any]) -> None:
    head = head_of(**variant)
    native, plain = Steps(head), by_torch(head)
    assert native.native is not None
    caches = cache_of("a", "b"), cache_of("a", "b")
    for number, feeds in enumerate(passes()):
        given = states(sum(len(feed.tokens) for feed in feeds), number)
        (ours, our_logits), (theirs, their_logits) = (
            steps.run(lay_out(feeds, cache), cache, given) for steps, cache in zip((native, plain), caches, strict=True)
        )
        assert ours.shape == theirs.shape and our_logits.shape == their_logits.shape
        # Where a number lies between two bytes, the last bit of a norm decides: so not to the last bit.
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
        assert (our_logits - their_logits).norm() < 0.01 * their_logits.norm()


def test_both_see_rows_that_were_moved() -> None:
    """Behind a gap a row's position is not its place in the cache."""
    head, feeds = head_of(), [Feed("a", list(range(9)), 0, 9)]
    found = []
    for steps in (Steps(head), by_torch(head)):
        for moved in (0, 37):
            cache = cache_of("a")
            batch = lay_out(feeds, cache)
            batch.positions = [position + moved * (position > 3) for position in batch.positions]
            found.append(steps.run(batch, cache, states(9))[0])
    assert (found[1] - found[3]).norm() < 0.2 * (found[1] - found[0]).norm()
    assert torch.equal(found[1][:4], found[0][:4]) and not torch.equal(found[1][4:], found[0][4:])


def test_a_wrong_ancestor_would_be_seen() -> None:
    """The control: the deeper nodes with each other's parents give other states."""
    head = head_of()
    steps, results = Steps(head), []
    for bits in ((0b01001, 0b10010), (0b01010, 0b10001)):
        cache = cache_of("a", "b")
        for number, feeds in enumerate(passes()[:2]):
            steps.run(lay_out(feeds, cache), cache, states(sum(len(feed.tokens) for feed in feeds), number))
        results.append(steps.run(lay_out([Feed("b", [6, 5], 3, 2, bits, 3)], cache), cache, states(2, 2))[0])
    assert (results[0] - results[1]).norm() > 0.05 * results[0].norm()


def test_a_row_is_the_same_in_any_batch() -> None:
    steps, cache = Steps(head_of()), cache_of("a", "b")
    given = states(33)
    both, _ = steps.run(lay_out([Feed("a", list(range(30)), 0, 1), Feed("b", [1, 2, 3], 0, 1)], cache), cache, given)
    alone, _ = steps.run(lay_out([Feed("b", [1, 2, 3], 0, 1)], cache), cache, given[30:])
    assert torch.equal(both[30:], alone)


def test_long_texts_go_through_in_parts() -> None:
    head, cache = head_of(), KVCache([LayerShape(2, 32, 32)], 80, 4)
    cache.open("a", [])
    cache.reserve("a", 300)
    feeds = [Feed("a", [i % 50 for i in range(300)], 0, 2)]
    ours, our_logits = Steps(head).run(lay_out(feeds, cache), cache, states(300))
    theirs, _ = by_torch(head).run(lay_out(feeds, cache), cache, states(300))
    assert len(ours) == 300 and len(our_logits) == 2
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("changes", [{"head_dim": 16}, {"hidden_size": 40, "head_dim": 32}])
def test_other_shapes_are_left_to_torch(changes: dict[str, Any]) -> None:
    with torch.random.fork_rng(devices=[]):
        head = Eagle3Head(Eagle3Config(**SIZES | changes), lambda tokens: tokens, range(40))
    packed(head.requires_grad_(False), 8)
    assert compiled(head) is None


@pytest.mark.parametrize("bits", [0, 4])
def test_other_weights_are_left_to_torch(bits: int) -> None:
    head, cache = head_of(bits), cache_of("a")
    assert compiled(head) is None
    hidden, logits = Steps(head).run(lay_out([Feed("a", [1, 2, 3], 0, 2)], cache), cache, states(3))
    assert hidden.shape == (3, 64) and logits.shape == (2, 40)
