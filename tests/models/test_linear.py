"""Quantised products: exact in each way a CPU has to multiply bytes, and rows that do not know of each other."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit, types

from pilotfish.attention.vectors import VI, dot_kinds, instruction
from pilotfish.errors import ModelError, OptionError
from pilotfish.models.linear import PackedLinear, pack, unpack
from pilotfish.models.options import bits_of, name_of
from pilotfish.models.products import GROUP, GROUPED, ROWS, tile_product

KINDS = dot_kinds()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dots(kind: Any, sums: np.ndarray, unsigned: np.ndarray, signed: np.ndarray) -> np.ndarray:
    def write(context: Any, c: Any, u: Any, s: Any, out: Any) -> None:
        e = context
        e.store(e.dot_bytes(e.load(c, VI), e.load(u, VI), e.load(s, VI), kind), out)

    emit = instruction(types.void, write)

    @njit
    def run(c, u, s, out):  # type: ignore[no-untyped-def]
        emit(c.ctypes.data, u.ctypes.data, s.ctypes.data, out.ctypes.data)

    out = np.zeros(16, np.int32)
    run(sums, unsigned, signed, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_bytes_are_exact_where_the_older_instruction_saturates(kind: str) -> None:
    rng = np.random.default_rng(0)
    sums = rng.integers(-1000, 1000, 16).astype(np.int32)
    unsigned, signed = rng.integers(0, 256, 64).astype(np.uint8), rng.integers(-128, 128, 64).astype(np.int8)
    unsigned[:16], signed[:8], signed[8:16] = 255, 127, -128  # two such products do not fit 16 bits
    wanted = sums + (unsigned.astype(np.int64) * signed).reshape(16, 4).sum(1)
    assert abs(wanted[:4]).max() > 2 * 2**15
    assert np.array_equal(dots(kind, sums, unsigned, signed), wanted)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12), (GROUPED, 0.008)])
@pytest.mark.parametrize("shape", [(48, 128), (49, 100), (3, 1)])
def test_packing_keeps_a_weight_to_within_its_bits(shape: tuple[int, int], bits: int, error: float) -> None:
    weight = normal(*shape)
    back = unpack(pack(weight, bits))
    assert back.shape == weight.shape
    assert float((back - weight).norm() / weight.norm()) < error


def test_packing_of_a_row_of_zeros() -> None:
    weight = normal(17, 70)
    weight[3], weight[5, GROUP:] = 0, 0
    for bits in (8, 4, GROUPED):
        back = unpack(pack(weight, bits))
        assert not back[3].any() and not back[5, GROUP:].any()
        assert back.isfinite().all()


def tile(bits: int, rows: int, kind: Any, arrays: list[np.ndarray]) -> np.ndarray:
    """The first ``rows`` of a block times one tile of two groups."""
    emit = tile_product(bits, rows, kind)

    @njit
    def run(w, s, b, r, rs, rt, out):  # type: ignore[no-untyped-def]
        emit(w, s, b, r, rs, rt, out, 64, 2, 0)

    out = np.zeros((rows, 16), np.float32)
    run(*(array.ctypes.data for array in (*arrays, out)))
    return out


@pytest.mark.parametrize("bits", [8, 4, GROUPED])
def test_every_way_to_multiply_gives_the_same_bits(bits: int) -> None:
    packed = pack(normal(16, 2 * GROUP) * torch.logspace(-7, 3, 16)[:, None], bits, normal(16, seed=1))
    rng = np.random.default_rng(0)
    data = rng.integers(-127, 128, (2, GROUP // 4, ROWS, 4)).astype(np.int8)
    sums = data.sum((1, 3), dtype=np.int32)
    both = np.stack([-128 * sums, sums.astype(np.float32).view(np.int32)], 1)
    scales = rng.random((2, ROWS)).astype(np.float32)
    arrays = [packed.weights, packed.scales, packed.bias, data, scales, both]
    x = (data.astype(np.float64) * scales[:, None, :, None]).transpose(2, 0, 1, 3).reshape(ROWS, -1)
    wanted = x @ unpack(packed).double().numpy().T + packed.bias
    whole = tile(bits, 8, KINDS[0], arrays)
    assert np.allclose(whole, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(0))
    if bits == 4:  # among the scales are some that float16 holds with fewer digits
        assert (np.abs(packed.scales[packed.scales != 0]) < 6e-5).any()
    for kind in KINDS:
        assert np.array_equal(tile(bits, 3, kind, arrays), whole[:3]), kind


@pytest.mark.parametrize("bits", [8, 4, GROUPED])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13])
def test_product_is_that_of_the_unpacked_weight(bits: int, rows: int) -> None:
    weight, bias, x = normal(50, 200), normal(50, seed=1), normal(rows, 200, seed=2)
    linear, loops = (PackedLinear(weight, bits, bias, kernels=kernels) for kernels in ("auto", "numba"))
    assert torch.equal(linear(x), loops(x)), "C++, where it can be built, and numba: the same bits"
    # The rows are rounded too: do the same here, in groups.
    padded = torch.nn.functional.pad(x, (0, -200 % GROUP)).view(rows, -1, GROUP)
    scales = padded.abs().amax(2, keepdim=True) / 127
    rounded = ((padded / scales).round() * scales).reshape(rows, -1)[:, :200]
    wanted = rounded.double() @ unpack(linear.packed).double().T + bias.double()
    assert float((linear(x) - wanted).abs().max() / wanted.abs().max()) < 1e-5


@pytest.mark.parametrize("kernels", ["auto", "numba"])
@pytest.mark.parametrize("bits", [8, 4, GROUPED])
def test_a_row_is_bitwise_the_same_in_any_company(bits: int, kernels: str) -> None:
    x = normal(21, 130) * torch.logspace(-3, 3, 21)[:, None]
    linear = PackedLinear(normal(70, 130, seed=1), bits, kernels=kernels)
    together = linear(x)
    for start, stop in ((0, 1), (3, 5), (4, 8), (6, 19), (20, 21)):
        assert torch.equal(linear(x[start:stop]), together[start:stop])
    # The negative control: torch's own float product does not promise that, and a scale per tensor cannot.
    one_scale = (x / x.abs().max() * 127).round()
    alone = (x[:1] / x[:1].abs().max() * 127).round()
    assert not torch.equal(one_scale[:1], alone)


def test_a_row_of_nan_spoils_itself_only() -> None:
    x = normal(4, 64)
    linear = PackedLinear(normal(16, 64, seed=1), 8)
    clean = linear(x)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    spoilt = linear(x)
    assert not spoilt[1].isfinite().any() and not spoilt[2].isfinite().any()
    assert torch.equal(spoilt[[0, 3]], clean[[0, 3]])


def test_threads_change_nothing() -> None:
    x, linear = normal(9, 128), PackedLinear(normal(300, 128, seed=1), 8)
    before = torch.get_num_threads()
    try:
        results = []
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            results.append(linear(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_the_options_own_number_for_a_file_s_bits_is_the_products() -> None:
    assert bits_of("gguf") == GROUPED and name_of(GROUPED) == "gguf"


def test_bad_input_is_named() -> None:
    weight = normal(16, 64)
    weight[2, 3] = float("inf")
    with pytest.raises(ModelError, match="3.down cannot be quantised: it holds a NaN or an infinity"):
        pack(weight, 8, name="3.down")
    with pytest.raises(OptionError, match="none, int8, int4, gguf, not 'int5'"):
        bits_of("int5")
