"""A GGUF file's own numbers in our tiles: exact where they can be, nearest elsewhere, and never in the wrong order."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pilotfish.models import gguf_blocks
from pilotfish.models.gguf_blocks import pack_blocks
from pilotfish.models.linear import Packed, unpack
from pilotfish.models.products import GROUP, GROUPED
from tests.models.gguf_files import HALVES, random_rows


def both(kind: Kind, bits: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, Packed]:
    """What our tiles stand for, and what the `gguf` package reads in the same bytes."""
    meant = gguf.quants.dequantize(rows, kind)
    parts = pack_blocks(kind, rows, bits)
    packed = Packed(bits, meant.shape[1], len(rows), *parts, np.zeros(-(-len(rows) // 16) * 16, np.float32))
    return unpack(packed).numpy(), meant, packed


EXACT = [(Kind.Q4_0, 4), (Kind.Q4_1, 4), (Kind.Q4_0, GROUPED), (Kind.Q5_0, GROUPED), (Kind.Q8_0, GROUPED)]


@pytest.mark.parametrize(("kind", "bits"), EXACT)
@pytest.mark.parametrize("shape", [(48, 96), (50, 32)])
def test_numbers_that_our_tiles_hold_are_the_same_to_the_last_bit(kind: Kind, bits: int, shape: tuple[int, int]):
    rows = random_rows(kind, *shape)
    rows[1, :2], rows[2, :2] = 0, (3, 0)  # no scale at all, and one that float16 holds with fewer digits
    ours, meant, _ = both(kind, bits, rows)
    assert np.array_equal(ours, meant) and ours.any()


def test_four_bits_with_scales_of_scales_are_rounded_to_float16_only():
    ours, meant, packed = both(Kind.Q4_K, 4, random_rows(Kind.Q4_K, 48, 512))
    scales, minimums = packed.scales.astype(np.float64).reshape(3, -1, 2, 16).transpose(2, 0, 3, 1).reshape(2, 48, -1)
    allowed = 2.0**-11 * (15 * abs(scales) + abs(minimums)) + 2.0**-20
    errors = abs(ours - meant).reshape(48, -1, GROUP).max(2)
    assert (errors <= allowed).all() and errors.any()


@pytest.mark.parametrize(
    "kind",
    [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_1, Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
     Kind.IQ4_XS],
)  # fmt: skip
def test_other_numbers_become_the_nearest(kind: Kind):
    ours, meant, packed = both(kind, GROUPED, random_rows(kind, 40, 256))
    errors, largest = (abs(one).reshape(40, -1, GROUP).max(2) for one in (ours - meant, meant))
    scales = packed.scales.astype(np.float32).reshape(3, -1, 16).transpose(0, 2, 1).reshape(48, -1)[:40]
    allowed = np.maximum(0.5 * scales, largest - 127 * scales)  # float16 may end a scale short of the largest weight
    assert (errors <= 1.0001 * allowed).all() and (scales < 1.01 * largest / 127 + 1e-7).all() and largest.any()


def test_inputs_that_fill_no_group():
    values = np.random.default_rng(0).standard_normal((20, 40), np.float32)
    ours, _, _ = both(Kind.F32, GROUPED, values.view(np.uint8))
    assert ours.shape == (20, 40) and abs(ours - values).max() < 0.02


@pytest.mark.parametrize(
    ("kind", "bits"), [(Kind.Q4_0, 4), (Kind.Q4_1, 4), (Kind.Q4_K, 4), (Kind.Q4_0, GROUPED), (Kind.Q5_0, GROUPED)]
)
def test_the_wrong_order_of_half_bytes_is_noticed(kind: Kind, bits: int, monkeypatch: pytest.MonkeyPatch):
    """The negative control: high halves first."""
    rows, right = random_rows(kind, 16, 256), gguf_blocks._nibbles
    ours, meant, _ = both(kind, bits, rows)
    error = abs(ours - meant).max()

    def wrong(words: np.ndarray) -> np.ndarray:
        halves = np.split(right(words), 2, -1)
        return np.concatenate(halves[::-1], -1)

    monkeypatch.setattr(gguf_blocks, "_nibbles", wrong)
    ours, meant, _ = both(kind, bits, rows)
    assert abs(ours - meant).max() > 100 * error + 1e-4


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q5_0, Kind.Q6_K, Kind.Q8_0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_scales_are_noticed(kind: Kind, bad: float):
    rows, place = random_rows(kind, 16, 256), HALVES[kind][-1]
    rows[5, place : place + 2] = np.array([bad], np.float16).view(np.uint8)
    with np.errstate(invalid="ignore"), pytest.raises(gguf_blocks.NotFiniteError):
        pack_blocks(kind, rows, 4 if kind in gguf_blocks.TO_4_BITS else GROUPED)
