"""Linear layers with packed weights. How weights become bytes, and one product for whoever needs one.

It does not know models or files. The one trick: a scale belongs to a *row's* group of 32 inputs, never to a tensor,
so the same row has the same bytes in any batch, and one loud channel drowns only its 31 neighbours.

int8: one scale per output. int4: a scale and a minimum per output and 32 inputs, float16 both; see `four_bits`.
GROUPED: int8's bytes with a float16 scale per output and 32 inputs, as GGUF files have them. See `products` for the
layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention.vectors import compiled
from ..errors import ModelError
from .four_bits import LARGEST, fit
from .kernels import chosen
from .products import (
    GROUP,
    GROUPED,
    ROWS,
    SUMS_LINE,
    ZERO_POINT,
    multiply_tile,
    quantise_row,
    scale_bytes,
    tile_bytes,
)
from .team import counters, finish, take, team

_ROWS_AT_ONCE = 16384  # outputs that are in float at a time while a matrix is packed
Array = np.ndarray[Any, Any]


def pick_rows(
    weights: Array, scales: Array, bias: Array, ids: Sequence[int], bits: int = 8
) -> tuple[Array, Array, Array]:
    """Weights, scales and bias of a smaller matrix packed at 8 bits or GROUPED: these outputs of a larger one, byte for
    byte."""
    numbers, places = np.array(ids, np.int64), np.arange(len(ids))
    num_tiles, width = -(-len(ids) // 16), weights.size // bias.size
    memory = np.zeros(num_tiles * 16 * width + 64, np.uint8)
    begin = -memory.ctypes.data % 64  # a vector that lies across two cache lines is loaded twice
    picked = memory[begin : begin + num_tiles * 16 * width]
    rows = picked.reshape(num_tiles, width // 4, 16, 4)
    rows[places // 16, :, places % 16] = _by_tile(weights, bias.size)[numbers // 16, :, numbers % 16]
    shift, factors = (
        np.zeros(num_tiles * 16, np.float32),
        np.zeros(num_tiles * 16 * scales.size // bias.size, scales.dtype),
    )
    shift[: len(ids)] = bias[numbers]
    if bits == GROUPED:
        lines = factors.reshape(num_tiles, width // GROUP, 16)
        lines[places // 16, :, places % 16] = scales.reshape(-1, width // GROUP, 16)[numbers // 16, :, numbers % 16]
    else:
        factors[: len(ids)] = scales[numbers]
    return picked, factors, shift


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [outputs, inputs] as bytes, padded to whole tiles; arrays as `products` wants them. bits: 8, 4 or
    GROUPED."""

    bits: int
    inputs: int
    outputs: int
    weights: Array
    scales: Array
    bias: Array

    @property
    def num_groups(self) -> int:
        return -(-self.inputs // GROUP)

    @property
    def num_tiles(self) -> int:
        return -(-self.outputs // 16)

    def matrix(self) -> list[int]:
        """Addresses of weights, scales and bias, and the bits. The arrays must outlive their use."""
        return [self.weights.ctypes.data, self.scales.ctypes.data, self.bias.ctypes.data, self.bits]


def pack(weight_ND: Tensor, bits: int, bias_N: Tensor | None = None, name: str = "weight") -> Packed:
    """Quantise a float weight. Raises ModelError, naming it, if there is a NaN or an infinity in it, or a number that
    float16 scales do not reach (int8's are float32)."""
    outputs, inputs = weight_ND.shape
    pieces = [_pack_rows(weight_ND[i : i + _ROWS_AT_ONCE], bits, name) for i in range(0, outputs, _ROWS_AT_ONCE)]
    bias = torch.zeros(-(-outputs // 16) * 16)
    if bias_N is not None:
        bias[:outputs] = bias_N.float()
    return Packed(
        bits,
        inputs,
        outputs,
        np.concatenate([weights for weights, _ in pieces]),
        np.concatenate([scales for _, scales in pieces]),
        bias.numpy(),
    )


def unpack(packed: Packed) -> Tensor:
    """The weight that the bytes stand for, [outputs, inputs] float32."""
    tiles, groups = packed.num_tiles, packed.num_groups
    data = torch.from_numpy(np.array(packed.weights))
    scales = torch.from_numpy(np.array(packed.scales))
    if packed.bits == 8:
        numbers = data.view(tiles, groups * GROUP // 4, 16, 4).permute(0, 2, 1, 3).reshape(tiles * 16, -1)
        values = (numbers.float() - ZERO_POINT) * scales[:, None]
    elif packed.bits == GROUPED:
        numbers = data.view(tiles, groups * GROUP // 4, 16, 4).permute(0, 2, 1, 3).reshape(tiles * 16, groups, GROUP)
        by_group = scales.float().view(tiles, groups, 16).permute(0, 2, 1).reshape(tiles * 16, groups, 1)
        values = ((numbers.float() - ZERO_POINT) * by_group).reshape(tiles * 16, -1)
    else:
        data = data.view(tiles, groups * GROUP // 8, 16, 4)
        halves = torch.stack([data & 15, data >> 4], 2)  # [tiles, 8 inputs, half, outputs, 4]
        numbers = halves.permute(0, 3, 1, 2, 4).reshape(tiles * 16, groups, GROUP)
        by_output = scales.float().view(tiles, groups, 2, 16).permute(2, 0, 3, 1).reshape(2, tiles * 16, groups, 1)
        values = (numbers.float() * by_output[0] + by_output[1]).reshape(tiles * 16, -1)
    return values[: packed.outputs, : packed.inputs]


def unpack_rows(weights: Array, scales: Array, ids_N: Tensor, inputs: int, bits: int = 8) -> Tensor:
    """Some rows of a matrix packed at 8 bits or GROUPED, [N, inputs] float32, without unpacking the others."""
    numbers = ids_N.numpy()
    groups = -(-inputs // GROUP)
    rows = _by_tile(weights, weights.size // (groups * GROUP))[numbers // 16, :, numbers % 16]
    values = rows.reshape(len(numbers), groups, GROUP).astype(np.float32) - ZERO_POINT
    if bits == GROUPED:
        values *= scales.reshape(-1, groups, 16)[numbers // 16, :, numbers % 16, None]
    else:
        values *= np.asarray(scales)[numbers][:, None, None]
    return torch.from_numpy(values.reshape(len(numbers), -1)[:, :inputs])


def _by_tile(weights: Array, outputs: int) -> Array:
    """int8's bytes, [tiles, inputs / 4, 16, 4]. outputs: whole tiles of them."""
    return weights.reshape(outputs // 16, -1, 16, 4)


def _pack_rows(weight: Tensor, bits: int, name: str) -> tuple[Array, Array]:
    """Bytes and scales of some outputs (a multiple of 16, or the last ones)."""
    outputs, inputs = weight.shape
    tiles, groups = -(-outputs // 16), -(-inputs // GROUP)
    full = torch.zeros(tiles * 16, groups * GROUP)
    full[:outputs, :inputs] = weight.float()
    if not bool(full.isfinite().all()):
        raise ModelError(f"{name} cannot be quantised: it holds a NaN or an infinity")
    if bits == 8:
        scales = full.abs().amax(1) / 127
        numbers = (full / scales.clamp(min=1e-30)[:, None]).round_().add_(128).to(torch.uint8)
        packed = numbers.view(tiles, 16, groups * GROUP // 4, 4).permute(0, 2, 1, 3).contiguous()
        return packed.view(-1).numpy(), scales.numpy()
    largest = float(full.abs().max())
    if largest > (LARGEST if bits == 4 else 127 * LARGEST):
        wanted = "int4" if bits == 4 else "8 bits with scales of float16"
        raise ModelError(
            f"{name} cannot be quantised to {wanted}: it holds {largest:g}, and a float16 ends at 65504; use int8"
        )
    if bits == GROUPED:
        return _pack_groups(full.view(tiles, 16, groups, GROUP))
    # What is beyond the last input must not widen its group: the group's own values, once more.
    first = (groups - 1) * GROUP
    full[:, inputs:] = full[:, first + torch.arange(groups * GROUP - inputs) % (inputs - first)]
    numbers, scales, minimums = fit(full.view(-1, GROUP))
    halves = numbers.view(tiles, 16, groups * GROUP // 8, 2, 4).permute(
        0, 2, 1, 3, 4
    )  # [tiles, 8 inputs, outputs, half, 4]
    packed = (halves[..., 0, :] | (halves[..., 1, :] << 4)).contiguous()
    both = torch.stack([scales, minimums]).view(2, tiles, 16, groups).permute(1, 3, 0, 2).contiguous()
    return packed.view(-1).numpy(), both.view(-1).numpy()


def _pack_groups(full_TOGK: Tensor) -> tuple[Array, Array]:
    """Finite weights, [tiles, 16, groups, GROUP], as GROUPED."""
    numbers, scales = nearest_in_groups(full_TOGK.numpy())
    words = numbers.view(np.uint32).reshape(*numbers.shape[:2], -1)
    return np.ascontiguousarray(words.swapaxes(1, 2)).view(np.uint8).reshape(-1), scales.swapaxes(1, 2).reshape(-1)


def nearest_in_groups(weights: Array) -> tuple[Array, Array]:
    """GROUPED's numbers [..., GROUP] uint8, the zero point added, and scales [...] float16 for finite weights
    [..., GROUP] float32. In one thread: whoever has many calls it in several."""
    by_place = np.array(weights.reshape(-1, GROUP).T, order="C")  # along rows a maximum takes numpy four times as long
    largest = np.abs(by_place, out=by_place).max(0)
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(127)).astype(np.float16)
    # Near zero float16's own steps are wide: a scale rounded down would not reach the group's largest weight.
    short = scales.astype(np.float32) * np.float32(127.5) < largest
    scales = np.where(short, (scales.view(np.int16) + np.int16(1)).view(np.float16), scales)
    wide = scales.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    numbers = weights * inverse.reshape(*weights.shape[:-1], 1)
    np.rint(numbers, out=numbers)
    np.clip(numbers, -127, 127, out=numbers)
    numbers += ZERO_POINT
    return numbers.astype(np.uint8), scales.reshape(weights.shape[:-1])


class PackedLinear:
    """y = x W^T + b for float32 rows on a CPU, a row's result the same in any batch. For heads and tests; a decoder
    (`quantized`) uses its matrices inside one larger loop. kernels: see `kernels.runner`."""

    def __init__(
        self, weight_ND: Tensor, bits: int, bias_N: Tensor | None = None, name: str = "weight", kernels: str = "auto"
    ):
        self.packed = pack(weight_ND, bits, bias_N, name)
        self._native = chosen(kernels)

    def __call__(self, x_TD: Tensor) -> Tensor:
        packed, rows = self.packed, x_TD.shape[0]
        width = packed.num_groups * GROUP
        padded = np.zeros((rows, width), np.float32)
        padded[:, : packed.inputs] = x_TD.numpy()
        out = np.empty((rows, packed.num_tiles * 16), np.float32)
        blocked, groups = -(-rows // ROWS) * ROWS, packed.num_groups
        data = np.empty(blocked * width, np.int8)
        scales, sums = np.empty(blocked * groups, np.float32), np.empty(blocked * groups * SUMS_LINE // ROWS, np.uint8)
        matrix = np.array(packed.matrix())
        num_threads = torch.get_num_threads()
        if self._native is None:
            team(num_threads).run(_multiply, counters(2), padded, data, scales, sums, matrix, out)
        else:
            blocks = np.array([part.ctypes.data for part in (data, scales, sums)], np.int64)
            self._native.linear(
                num_threads, padded.ctypes.data, rows, groups, blocks.ctypes.data, matrix.ctypes.data,
                packed.num_tiles, out.ctypes.data,
            )  # fmt: skip
        return torch.from_numpy(out[:, : packed.outputs])


@compiled
def _multiply(phases: Array, x: Array, data: Array, scales: Array, sums: Array, matrix: Array, out: Array) -> None:
    rows, groups, num_done = x.shape[0], x.shape[1] // GROUP, 0
    phase = phases.ctypes.data
    while True:
        row = take(phase)
        if row >= rows:
            break
        quantise_row(
            x.ctypes.data + row * groups * GROUP * 4, row, np.int64(0), groups, groups, data.ctypes.data,
            scales.ctypes.data, sums.ctypes.data,
        )  # fmt: skip
        num_done += 1
    phase, num_done = finish(phase, rows, num_done), 0
    bits, tiles = matrix[3], out.shape[1] // 16
    tile_size, scale_size = tile_bytes(bits, groups), scale_bytes(bits, groups)
    while True:
        tile = take(phase)
        if tile >= tiles:
            break
        multiply_tile(
            bits,
            matrix[0] + tile * tile_size,
            matrix[1] + tile * scale_size,
            matrix[2] + tile * 64,
            rows,
            data.ctypes.data,
            scales.ctypes.data,
            sums.ctypes.data,
            groups,
            out.ctypes.data + tile * 64,
            out.shape[1] * 4,
            0,
        )
        num_done += 1
    finish(phase, tiles, num_done)
