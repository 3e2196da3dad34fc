"""A bias per span on the scores: the fused kernel against the definition, and the definition against plain sums."""

import random

import pytest
import torch

from pilotfish.attention import reference, sdpa
from pilotfish.paged.batch import lay_out
from pilotfish.paged.cache import KVCache, LayerShape
from tests.paged.ragged import fill, random_case, reserve

NUM_HEADS, WIDTH = 4, 8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_key_heads", [2, 4])
def test_biases_are_added_to_what_a_row_sees(seed: int, num_key_heads: int):
    source = random.Random(seed)
    cache = KVCache([LayerShape(num_key_heads, WIDTH, WIDTH)], 64, 4, dtype=torch.float64)
    cases = [random_case(name, source) for name in "abcd"]
    reserve(cache, cases)
    fill(cache, seed)
    batch = lay_out([case.feed for case in cases], cache)
    generator = torch.Generator().manual_seed(seed)
    q_THD = torch.randn(batch.num_rows, NUM_HEADS, WIDTH, generator=generator, dtype=torch.float64)
    biases = [
        torch.randn(NUM_HEADS, span.stop - span.start, span.feed.num_keys, generator=generator, dtype=torch.float64)
        for span in batch.spans
    ]
    args = (q_THD, cache.keys[0], cache.values[0], batch)
    plain, biased = (reference.attend(*args, scale=0.3, biases=own) for own in (None, biases))
    torch.testing.assert_close(sdpa.attend(*args, scale=0.3, biases=biases), biased)
    assert (plain - biased).abs().max() > 0.01
    for span, case, bias_HRK in zip(batch.spans, cases, biases, strict=True):
        for row in range(span.stop - span.start):
            seen = case.visible(row, None)
            slots = torch.tensor(cache.slots(case.feed.sequence, 0, case.feed.num_keys))[seen]
            for head in range(NUM_HEADS):
                keys, values = (own[0][slots, head * num_key_heads // NUM_HEADS] for own in (cache.keys, cache.values))
                scores = 0.3 * keys @ q_THD[span.start + row, head] + bias_HRK[head, row, seen]
                torch.testing.assert_close(scores.softmax(0) @ values, biased[span.start + row, head])


@pytest.mark.parametrize("seed", range(6))
def test_key_positions_are_counted_along_the_tree(seed: int):
    source = random.Random(seed)
    cache = KVCache([LayerShape(1, 1, 1)], 64, 4)
    cases = [random_case(name, source) for name in "abcdef"]
    reserve(cache, cases)
    for span, case in zip(lay_out([case.feed for case in cases], cache).spans, cases, strict=True):
        positions = span.key_positions().tolist()
        for row in range(span.stop - span.start):
            for key in case.visible(row, None):
                assert positions[key] == case.position(key)
