"""The definition of correct attention, against sums over explicitly visible keys; and the fused kernel against it."""

import math
import random

import pytest
import torch
from torch import Tensor

from pilotfish.attention import reference, sdpa
from pilotfish.paged.batch import Batch, lay_out
from pilotfish.paged.cache import KVCache, LayerShape
from tests.paged.ragged import Case, fill, plain, random_case, reserve, tree

KEY_HEADS, KEY_DIM, VALUE_DIM, SCALE = 2, 6, 4, 0.4

OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 4, "softcap": 2.0, "sinks": True},
}


def cases_of(seed: int) -> list[Case]:
    source = random.Random(seed)
    return [plain("prompt", range(5), 0), tree("tree", [-1, -1, 0, 0, 3], 7), plain("token", [1], 11),
            *(random_case(str(i), source) for i in range(4))]  # fmt: skip


def scene(cases: list[Case], repeats: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, KVCache, Batch]:
    """Queries, and a cache full of numbers; where nothing was written there are numbers too, to be noticed."""
    cache = KVCache([LayerShape(KEY_HEADS, KEY_DIM, VALUE_DIM)], 64, 4, dtype=dtype)
    reserve(cache, cases)
    fill(cache)
    batch = lay_out([case.feed for case in cases], cache)
    generator = torch.Generator().manual_seed(1)
    q_THD = torch.randn(batch.num_rows, KEY_HEADS * repeats, KEY_DIM, generator=generator, dtype=torch.float64)
    return q_THD.to(dtype), cache, batch


def options_of(name: str, repeats: int, dtype: torch.dtype = torch.float64) -> dict:
    options = dict(OPTIONS[name])
    if options.pop("sinks", False):
        options["sinks_H"] = torch.linspace(-1, 1, KEY_HEADS * repeats, dtype=dtype)
    return options


def by_definition(
    q_THD: Tensor,
    cache: KVCache,
    cases: list[Case],
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Row by row, head by head, key by key."""
    repeats, rows = q_THD.shape[1] // KEY_HEADS, []
    for case in cases:
        slots = list(cache.slots(case.feed.sequence, 0, case.feed.num_keys))
        for row in range(len(case.feed.tokens)):
            q_HD = q_THD[len(rows)]
            heads = []
            for head in range(len(q_HD)):
                own = head // repeats  # neighbours share a key head
                total, out = 0.0 if sinks_H is None else math.exp(sinks_H[head]), torch.zeros(VALUE_DIM).double()
                for key in case.visible(row, window):
                    score = float(q_HD[head] @ cache.keys[0][slots[key], own].double()) * SCALE
                    score = score if softcap is None else softcap * math.tanh(score / softcap)
                    total += math.exp(score)
                    out += math.exp(score) * cache.values[0][slots[key], own]
                heads.append(out / total)
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_is_the_definition(name: str, repeats: int):
    cases = cases_of(seed=repeats)
    q_THD, cache, batch = scene(cases, repeats)
    options = options_of(name, repeats)
    out_THD = reference.attend(q_THD, cache.keys[0], cache.values[0], batch, scale=SCALE, **options)
    torch.testing.assert_close(out_THD, by_definition(q_THD, cache, cases, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("repeats", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_fused_kernel_agrees(name: str, repeats: int, seed: int):
    q_THD, cache, batch = scene(cases_of(seed), repeats)
    arguments, options = (q_THD, cache.keys[0], cache.values[0], batch), options_of(name, repeats)
    ours = sdpa.attend(*arguments, scale=SCALE, **options)
    torch.testing.assert_close(ours, reference.attend(*arguments, scale=SCALE, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_the_fused_kernel_agrees_in_other_types(dtype: torch.dtype, tolerance: float):
    cases = cases_of(seed=0)
    q_THD, cache, batch = scene(cases, 2, dtype)
    ours = sdpa.attend(q_THD, cache.keys[0], cache.values[0], batch, scale=SCALE, window=4)
    assert ours.dtype == dtype
    exact = by_definition(q_THD.double(), cache, cases, window=4)
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend])
def test_a_sequence_is_the_same_alone_and_in_company(attend):
    """Where its pages lie and who else is in the pass must not matter."""
    cases = cases_of(seed=2)
    q_THD, cache, batch = scene(cases, 2)
    together = attend(q_THD, cache.keys[0], cache.values[0], batch, scale=SCALE)
    for case, span in zip(cases, batch.spans, strict=True):
        alone = lay_out([case.feed], cache)
        out = attend(q_THD[span.start : span.stop], cache.keys[0], cache.values[0], alone, scale=SCALE)
        torch.testing.assert_close(out, together[span.start : span.stop], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attend", [reference.attend, sdpa.attend])
def test_unseen_keys_do_not_matter(attend):
    """Not even NaN: rows of rejected drafts and pages of others hold whatever was there before."""
    cases = [tree("a", [-1, -1, 0], 6), plain("b", [1, 2], 3)]
    q_THD, cache, batch = scene(cases, 2)
    arguments = (q_THD, cache.keys[0], cache.values[0], batch)
    before = attend(*arguments, scale=SCALE)
    used = {slot for case in cases for slot in cache.slots(case.feed.sequence, 0, case.feed.num_keys)}
    unused = [slot for slot in range(cache.capacity) if slot not in used]
    cache.keys[0][unused] = cache.values[0][unused] = float("nan")
    assert torch.equal(attend(*arguments, scale=SCALE), before)


def test_a_sink_takes_its_share_and_gives_nothing():
    cases = [plain("a", [1], 0)]
    q_THD, cache, batch = scene(cases, 1)
    arguments = (q_THD, cache.keys[0], cache.values[0], batch)
    score = (q_THD[0] * cache.keys[0][0]).sum(-1) * SCALE
    out = sdpa.attend(*arguments, scale=SCALE, sinks_H=score)  # as strong as the only key: half is left
    torch.testing.assert_close(out, sdpa.attend(*arguments, scale=SCALE) / 2)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_every_option_matters(name: str):
    """Negative control."""
    q_THD, cache, batch = scene(cases_of(seed=0), 2)
    arguments = (q_THD, cache.keys[0], cache.values[0], batch)
    with_it = reference.attend(*arguments, scale=SCALE, **options_of(name, 2))
    assert (with_it - reference.attend(*arguments, scale=SCALE)).abs().max() > 1e-3
