"""Both engines of a quantised decoder, side by side: the same bits in every family, and in draft heads."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pilotfish.attention.compiled import BLOCK
from pilotfish.decoding.sampling import likeliest
from pilotfish.errors import OptionError
from pilotfish.models import kernels
from pilotfish.models.load import load
from pilotfish.models.options import LoadOptions
from pilotfish.models.quantize import quantise
from pilotfish.models.quantized import QuantizedDecoder
from pilotfish.paged.batch import Feed, lay_out

from ..native.test_kernels import built
from .test_quantized import LONG, SHAPE, begun, logits
from .tiny import tiny_model

KINDS = built() or [pytest.param("none", marks=pytest.mark.skip("no C++ compiler here"))]
SIBLINGS = (1, 2, 5, 9, 18)  # ancestors of nodes 0..4: 0, 1, 0-2, 0-3, 1-4


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def both(kind: str, bits: int, instructions: str, **shape: Any) -> tuple[QuantizedDecoder, QuantizedDecoder]:
    weights = quantise(tiny_model(kind, dtype=torch.float32, **SHAPE | shape), bits)
    ours, loops = (QuantizedDecoder(weights, kind, kernels="numba") for _ in range(2))
    ours._runner = functools.partial(kernels._run_native, kernels.library(instructions))
    ours._finds_best = True
    return ours, loops


@pytest.mark.parametrize("instructions", KINDS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_both_engines_give_the_same_bits(kind: str, bits: int, instructions: str) -> None:
    for past in (5, 2 * BLOCK + 7):
        results = []
        for lm in both(kind, bits, instructions):
            cache = begun(lm, past)
            chain = logits(lm, cache, LONG[past : past + 9], past)
            tree = logits(lm, cache, LONG[past : past + 6], past, ancestors=SIBLINGS)
            keys = [keys[: past + 6].clone() for keys in cache.keys]
            results.append((chain, tree, *keys))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        chain, tree = results[0][:2]
        assert torch.equal(chain[:2], tree[:2]) and not torch.equal(chain[3:6], tree[3:6])


@pytest.mark.parametrize("instructions", KINDS[:1])
def test_rows_and_threads_change_nothing(instructions: str, threads: None) -> None:
    lm, _ = both("llama", 4, instructions)
    past = BLOCK - 3
    tokens = LONG[past : past + 16]
    torch.set_num_threads(1)
    cache = begun(lm, past)
    alone = torch.cat([logits(lm, cache, [token], past + i) for i, token in enumerate(tokens)])
    for num in (1, 2, 3):
        torch.set_num_threads(num)
        for rows in (1, 2, 3, 5, 8, 13, 16):
            output = lm.forward(lay_out([Feed("a", tokens[:rows], past, rows)], cache), cache)
            assert torch.equal(output.logits_NV, alone[:rows]), (num, rows)
            assert output.best == likeliest(alone[:rows]), (num, rows)


@pytest.mark.parametrize("instructions", KINDS[:1])
def test_taps_wide_groups_and_long_batches(instructions: str) -> None:
    """8 query heads to a key head, more rows than go through at once, and hidden states on the way."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 1}
    outputs = []
    for lm in both("llama", 8, instructions, **shape):
        cache = begun(lm, 12)
        assert cache.reserve("a", 300)
        outputs.append(lm.forward(lay_out([Feed("a", LONG[12:290], 12, 3)], cache), cache, taps=(0, 2)))
    one, other = outputs
    assert one.best is other.best is None  # only where all rows go through at once
    assert torch.equal(one.logits_NV, other.logits_NV)
    assert all(torch.equal(one.taps[layer], other.taps[layer]) for layer in (0, 2))


@pytest.mark.parametrize("instructions", KINDS[:1])
@pytest.mark.parametrize("joined", [1, 2])
def test_draft_heads(instructions: str, joined: int) -> None:
    lm, _ = both("llama", 8, instructions, num_hidden_layers=1)
    facts, arrays = lm.architecture, dict(lm.quantised.arrays)
    wide = quantise(tiny_model(dtype=torch.float32, **SHAPE | {"hidden_size": 128, "num_hidden_layers": 1}), 8)
    arrays |= {name: wide.arrays[name] for name in arrays if name.startswith("0.qkv")}
    arrays["0.embedding_norm"] = np.linspace(0.5, 1.5, facts.hidden_size, dtype=np.float32)
    starts = torch.randn(2, 6, facts.hidden_size, generator=torch.Generator().manual_seed(0))
    results = []
    for engine in ("native", "numba"):
        head = QuantizedDecoder(type(wide)(lm.quantised.origin, arrays), "head", joined=joined, kernels=engine)
        cache = head.new_cache(8)
        cache.open("a", [])
        assert cache.reserve("a", 6)
        batch = lay_out([Feed("a", LONG[:6], 0, 6)], cache)
        results.append(head.forward(batch, cache, taps=(0,), starts=(starts[0], starts[1])))
    assert torch.equal(results[0].logits_NV, results[1].logits_NV)
    assert torch.equal(results[0].taps[0], results[1].taps[0])


def test_an_unknown_name_is_refused_and_the_nearest_is_told() -> None:
    with pytest.raises(OptionError, match="unknown kernels 'numbat'; did you mean 'numba'"):
        LoadOptions(kernels="numbat")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="kernels 'native' run int8 and int4.*quantization is 'none'"):
        LoadOptions(kernels="native")
    with pytest.raises(OptionError, match="unknown kernels"):
        load("demo", kernels="fast")  # type: ignore[arg-type]
