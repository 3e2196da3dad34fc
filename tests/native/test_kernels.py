"""Each kernel against plain numpy, in every kind that this CPU can run, and its rows in every company."""

from typing import Any

import llvmlite.binding
import numpy as np
import pytest
import torch

from pilotfish.models.kernels import library
from pilotfish.models.linear import Packed, pack, unpack
from pilotfish.models.products import GROUPED
from pilotfish.native import reference
from pilotfish.native.build import BuildError, kinds, plan
from pilotfish.native.library import Library, no_best

GROUP, ROWS, LINE = 32, 8, 64
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def built() -> list[str]:
    try:
        plan("plain")
    except BuildError:
        return []
    return kinds(llvmlite.binding.get_host_cpu_features())


@pytest.fixture(params=built() or [pytest.param("none", marks=pytest.mark.skip("no C++ compiler here"))])
def native(request: Any) -> Library:
    return library(request.param)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Blocks:
    """Rows, quantised by the library into blocks of 8, and read back out of them."""

    def __init__(self, native: Library, x_RK: np.ndarray):
        self.rows, width = x_RK.shape
        self.groups, blocks = width // GROUP, -(-self.rows // ROWS)
        self.data = np.zeros(blocks * self.groups * GROUP * ROWS, np.int8)
        self.scales = np.zeros(blocks * self.groups * ROWS, np.float32)
        self.sums = np.zeros(blocks * self.groups * LINE // 4, np.int32)
        self.table = np.array([a.ctypes.data for a in (self.data, self.scales, self.sums)], np.int64)
        for row in range(self.rows):
            line = np.ascontiguousarray(x_RK[row])
            native.quantise_row(line.ctypes.data, row, self.groups, self.table.ctypes.data)

    def bytes(self) -> np.ndarray:
        parts = self.data.reshape(-1, self.groups * GROUP // 4, ROWS, 4).transpose(0, 2, 1, 3)
        return parts.reshape(-1, self.groups * GROUP)[: self.rows]

    def factors(self) -> np.ndarray:
        return self.scales.reshape(-1, self.groups, ROWS).transpose(0, 2, 1).reshape(-1, self.groups)[: self.rows]


def times(native: Library, blocks: Blocks, packed: Packed, threads: int = 1, out: np.ndarray | None = None) -> Any:
    add = out is not None
    out = np.full((blocks.rows, packed.num_tiles * 16), np.nan, np.float32) if out is None else out
    matrix = np.array(packed.matrix(), np.int64)
    native.products(
        threads, matrix.ctypes.data, 1, blocks.table.ctypes.data, blocks.rows, packed.num_groups, packed.num_tiles,
        out.ctypes.data, out.shape[1], int(add),
    )  # fmt: skip
    return out


def padded(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))


def test_quantising_gives_the_same_bytes_and_scales(native: Library) -> None:
    x = normal(11, 3 * GROUP) * np.logspace(-8, 8, 11, dtype=np.float32)[:, None]
    x[2, :GROUP], x[3, 40], x[4, 5], x[5, 70] = 0, np.nan, np.inf, 1e-45
    blocks = Blocks(native, x)
    numbers, scales = reference.quantise(x)
    assert np.array_equal(blocks.bytes(), numbers)
    assert np.array_equal(blocks.factors(), scales, equal_nan=True)
    assert not np.array_equal(blocks.bytes(), reference.quantise(x * np.float32(1.02))[0][::-1])


@pytest.mark.parametrize("bits", [8, 4, GROUPED])
@pytest.mark.parametrize("shape", [(48, 128), (33, 100), (3, 1), (16, 32), (160, 608)])
def test_products(native: Library, shape: tuple[int, int], bits: int) -> None:
    weights = normal(*shape, seed=1)
    packed = pack(torch.from_numpy(weights), bits, torch.from_numpy(normal(1, shape[0], seed=2)[0]))
    x = padded(normal(16, shape[1], seed=3))
    blocks = Blocks(native, x)
    whole = np.zeros((packed.num_tiles * 16, x.shape[1]))
    whole[: shape[0], : shape[1]] = unpack(packed).numpy()
    wanted = reference.product(*reference.quantise(x), whole, packed.bias)
    out = times(native, blocks, packed)
    size = np.abs(x).sum(1).max() * np.abs(whole).max()
    np.testing.assert_allclose(out[:, : shape[0]], wanted[:, : shape[0]], rtol=1e-5, atol=1e-6 * size)
    again = times(native, blocks, packed, out=out.copy())
    np.testing.assert_allclose(again, out + (out + 0), rtol=1e-6)
    assert np.abs(wanted[:, : shape[0]] - np.roll(wanted, 1, 0)[:, : shape[0]]).max() > 1e-4 * size


@pytest.mark.parametrize("bits", [8, 4, GROUPED])
def test_sums_of_integers_are_exact_at_their_extremes(native: Library, bits: int) -> None:
    """The largest bytes of both kinds, where the older instruction saturates."""
    x = np.full((3, GROUP), 127, np.float32)
    x[1] = -127
    weights = np.full((16, GROUP), 127.0, np.float32)
    weights[:, ::2] *= -1.0 if bits == 4 else 1.0
    weights[1] = -127
    packed = pack(torch.from_numpy(weights), bits)
    numbers, scales = reference.quantise(x)
    wanted = reference.product(numbers, scales, unpack(packed).numpy(), packed.bias[:16])
    np.testing.assert_allclose(times(native, Blocks(native, x), packed), wanted, rtol=1e-6, atol=0.5)


@pytest.mark.parametrize("bits", [8, 4, GROUPED])
def test_a_row_is_bitwise_the_same_in_any_number_and_place(native: Library, bits: int) -> None:
    packed = pack(torch.from_numpy(normal(208, 224)), bits)
    x = normal(16, 224, seed=4)
    alone = np.concatenate([times(native, Blocks(native, x[i : i + 1]), packed) for i in range(16)])
    for rows in (1, 2, 3, 5, 8, 13, 16):
        for threads in (1, 2):
            for start in {0, 16 - rows}:
                out = times(native, Blocks(native, x[start : start + rows]), packed, threads)
                assert out.tobytes() == alone[start : start + rows].tobytes(), (rows, threads, start)
    loud = x.copy()
    loud[1:] *= 1e6
    assert times(native, Blocks(native, loud), packed)[0].tobytes() == alone[0].tobytes()
    assert alone[0].tobytes() != alone[1].tobytes()


def test_norm_rotation_and_activation(native: Library) -> None:
    x, weight, out = normal(96), normal(96, seed=1), np.zeros(96, np.float32)
    native.normalise(x.ctypes.data, weight.ctypes.data, 6, 1e-5, out.ctypes.data)
    np.testing.assert_allclose(out, reference.normalise(x, weight, 1e-5), **CLOSE)
    cosines, sines = np.cos(normal(48, seed=2)), np.sin(normal(48, seed=2))
    native.rotate(x.ctypes.data, cosines.ctypes.data, sines.ctypes.data, 3, out.ctypes.data)
    np.testing.assert_allclose(out, reference.rotate(x, cosines, sines), **CLOSE)
    gate = normal(96, seed=3) * 20
    gate[:4] = -200, 200, -0.0, 87.5
    for gelu in (False, True):
        native.activate(int(gelu), gate.ctypes.data, x.ctypes.data, out.ctypes.data, 6)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(out, reference.activate(gate, x, gelu), **CLOSE)


def test_an_embedding_is_read_out_of_its_tile(native: Library) -> None:
    packed = pack(torch.from_numpy(normal(16, 64)), 8)
    out, wanted = np.zeros(64, np.float32), unpack(packed).numpy()
    for lane in (0, 5, 15):
        native.unpack_bytes(packed.weights.ctypes.data, lane, float(packed.scales[lane]), 4, out.ctypes.data)
        assert np.array_equal(out, wanted[lane])
    packed = pack(torch.from_numpy(normal(16, 96)), GROUPED)
    out, wanted = np.zeros(96, np.float32), unpack(packed).numpy()
    for lane in (0, 5, 15):
        native.unpack_groups(packed.weights.ctypes.data, packed.scales.ctypes.data, lane, 1.0, 6, out.ctypes.data)
        assert np.array_equal(out, wanted[lane])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_best_is_numpy_s_argmax(native: Library, threads: int) -> None:
    rows = normal(6, 200, seed=5)
    rows[1] = np.round(rows[1])  # ties
    rows[2, [63, 64, 130]] = np.nan
    rows[3] = -np.inf
    rows[4, :], rows[4, 77] = -0.0, 0.0
    rows[5, [16, 199]] = np.inf
    for row in rows:
        for num in (1, 15, 16, 47, 200):
            for piece in (16, 64, 208):
                best = no_best(threads)
                native.find_best(row.ctypes.data, num, piece, best.ctypes.data, threads)
                wanted = int(row[:num].argmax())
                assert best["id"][0] == wanted, (num, piece)
                np.testing.assert_equal(best["value"][0], row[wanted])


def test_broken_rows_stay_their_own(native: Library) -> None:
    packed = pack(torch.from_numpy(normal(32, 64)), 4)
    x = normal(5, 64)
    clean = times(native, Blocks(native, x), packed)
    x[2, 3], x[4, 9] = np.nan, np.inf
    out = times(native, Blocks(native, x), packed)
    assert np.isnan(out[2]).all() and not np.isfinite(out[4]).any()
    assert out[[0, 1, 3]].tobytes() == clean[[0, 1, 3]].tobytes()
