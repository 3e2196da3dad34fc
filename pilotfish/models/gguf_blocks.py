"""Blocks of a GGUF file's matrices as our tiles: the same numbers in another order, where there are such.

It does not know files or models. The one trick: four numbers of a byte each are one word of 32 bits, in the file's
blocks as in our tiles; so whole words are masked, shifted and moved, and no number is ever looked at alone.

    Q4_0, Q4_1   to 4 bits: scale and minimum are the block's own
    Q4_K         to 4 bits: scale and minimum are products of two of the file's, rounded to float16
    Q8_0, Q5_0   to 8 bits (GROUPED): the scale is the block's own. So is Q4_0's where 8 bits are wanted
    all others   to 8 bits (GROUPED): the nearest numbers to what the blocks stand for

For the layouts of blocks see llama.cpp's ggml-common.h; of tiles, `products`.
"""

from collections.abc import Callable

import numpy as np
from gguf import quants

from .gguf_file import Kind
from .linear import Array, nearest_in_groups
from .products import GROUP, GROUPED

TO_4_BITS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K)
_LOW, _ALL_128 = np.uint32(0x0F0F0F0F), np.uint32(0x80808080)
# Each of four bits to the fifth bit of a byte.
_SPREAD = np.array([sum(16 << 8 * i for i in range(4) if bits >> i & 1) for bits in range(16)], np.uint32)


class NotFiniteError(ValueError):
    """A scale or a number that is a NaN or an infinity, or beyond float16."""


def pack_blocks(kind: Kind, rows: Array, bits: int) -> tuple[Array, Array]:
    """Weights and scales of tiles with 4 bits or GROUPED. rows: bytes [outputs, bytes of one]; outputs that lack to a
    whole tile are zero. Raises NotFiniteError, and as `values_of` does."""
    if -len(rows) % 16 and kind in (*TO_4_BITS, *_TO_BYTES):
        rows = np.concatenate([rows, np.zeros((-len(rows) % 16, rows.shape[1]), np.uint8)])
    if bits == 4:
        words, scales, minimums = _BY_4_BITS[kind](rows)
        words = words[..., 0::2] | words[..., 1::2] << np.uint32(4)
        return _tiled(words), _lines(np.stack([scales, minimums], -1))
    assert bits == GROUPED
    if kind in _TO_BYTES:
        words, scales = _TO_BYTES[kind](rows)
        return _tiled(words), _lines(scales[..., None])
    values = values_of(kind, rows)
    if not np.isfinite(values).all():
        raise NotFiniteError
    more = (0, -len(values) % 16), (0, -values.shape[1] % GROUP)
    if any(more[0] + more[1]):
        values = np.pad(values, more)
    numbers, nearest = nearest_in_groups(values.reshape(len(values), -1, GROUP))
    return _tiled(numbers.view(np.uint32)), _lines(nearest[..., None])


def values_of(kind: Kind, rows: Array) -> Array:
    """What the bytes stand for, float32, by the `gguf` package. Raises NotImplementedError for a type beyond it."""
    rows, own = np.ascontiguousarray(rows), getattr(quants, kind.name, None)
    if own is None:
        values: Array = quants.dequantize(rows, kind)
    else:  # the same at once, not 16 rows at a time, for which threads would wait for each other
        own.init_grid()
        values = own.dequantize_rows(rows)
    return values


def _tiled(words_NGW: Array) -> Array:
    """Words of each output to bytes, [tiles, words, 16 outputs, 4]."""
    num = words_NGW.shape[0]
    words = words_NGW.reshape(num // 16, 16, -1).swapaxes(1, 2)
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1)


def _lines(scales_NGP: Array) -> Array:
    """P scales per output and group to lines, [tiles, groups, P, 16 outputs]. Raises NotFiniteError."""
    if not np.isfinite(scales_NGP).all():
        raise NotFiniteError
    groups, parts = scales_NGP.shape[1:]
    return np.ascontiguousarray(scales_NGP.reshape(-1, 16, groups, parts).transpose(0, 2, 3, 1)).reshape(-1)


def _blocks(rows: Array, num_bytes: int) -> Array:
    return rows.reshape(len(rows), -1, num_bytes)


def _halves(blocks: Array, place: int) -> Array:
    """The float16 at this byte of each block."""
    halves: Array = np.ascontiguousarray(blocks[..., place : place + 2]).view(np.float16)[..., 0]
    return halves


def _words(blocks: Array, place: int, num: int) -> Array:
    words: Array = np.ascontiguousarray(blocks[..., place : place + 4 * num]).view(np.uint32)
    return words


def _nibbles(words: Array) -> Array:
    """Halves of bytes to bytes: all low ones, then all high ones, along the last axis."""
    return np.concatenate([words & _LOW, words >> np.uint32(4) & _LOW], -1)


def _q4_0(rows: Array) -> tuple[Array, Array, Array]:
    blocks = _blocks(rows, 18)
    scales = _halves(blocks, 0)
    with np.errstate(over="ignore"):  # noticed later
        return _nibbles(_words(blocks, 2, 4)), scales, scales * np.float16(-8)


def _q4_1(rows: Array) -> tuple[Array, Array, Array]:
    blocks = _blocks(rows, 20)
    return _nibbles(_words(blocks, 4, 4)), _halves(blocks, 0), _halves(blocks, 2)


def _q4_k(rows: Array) -> tuple[Array, Array, Array]:
    """Super-blocks of 8 groups: two float16, 6 bits for each group's scale and minimum, then pairs of groups, one in
    the low halves of 32 bytes and one in the high ones."""
    blocks = _blocks(rows, 144)
    num = len(blocks)
    six_bits = quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    with np.errstate(over="ignore", invalid="ignore"):
        scales, minimums = (
            (_halves(blocks, place).reshape(-1, 1).astype(np.float32) * six.astype(np.float32)).astype(np.float16)
            for place, six in zip((0, 2), six_bits, strict=True)
        )
    numbers = _nibbles(_words(blocks, 16, 32).reshape(num, -1, 8))
    return numbers.reshape(num, -1, GROUP // 4), scales.reshape(num, -1), -minimums.reshape(num, -1)


def _q4_0_as_bytes(rows: Array) -> tuple[Array, Array]:
    words, scales, _ = _q4_0(rows)
    return words + (_ALL_128 - np.uint32(0x08080808)), scales


def _q5_0_as_bytes(rows: Array) -> tuple[Array, Array]:
    """A fifth bit of each number in a word of its own."""
    blocks = _blocks(rows, 22)
    fifths = _words(blocks, 2, 1) >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    words = _nibbles(_words(blocks, 6, 4)) | _SPREAD[fifths]
    return words + (_ALL_128 - np.uint32(0x10101010)), _halves(blocks, 0)


def _q8_0_as_bytes(rows: Array) -> tuple[Array, Array]:
    blocks = _blocks(rows, 34)
    return _words(blocks, 2, 8) ^ _ALL_128, _halves(blocks, 0)


_BY_4_BITS: dict[Kind, Callable[[Array], tuple[Array, Array, Array]]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q4_K: _q4_k,
}
_TO_BYTES: dict[Kind, Callable[[Array], tuple[Array, Array]]] = {
    Kind.Q4_0: _q4_0_as_bytes,
    Kind.Q5_0: _q5_0_as_bytes,
    Kind.Q8_0: _q8_0_as_bytes,
}
