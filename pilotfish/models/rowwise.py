"""What a decoder does to one row between products: norm, rotation, activation, scaled copy, look-up of an embedding.

It does not know layers or threads. Each is one instruction for compiled loops, written out in vectors of 16 (see
`attention.vectors`), so that a row's result cannot depend on how many rows there are.

Addresses everywhere; widths are counted in vectors of 16 floats.
"""

import math
from typing import Any

from llvmlite import ir
from numba import types

from ..attention.vectors import F32, I32, LANES, VF, VI, Emit, instruction


def _normalise(context: Emit, row: Any, weight: Any, width: Any, epsilon: Any, out: Any) -> None:
    """out = weight * row / rms(row); width in sixteens."""
    e, b = context, context.builder
    squares = e.variable(e.constant(0.0))
    with e.loop(width) as index:
        x = e.load(row, VF, e.times(index, 64))
        b.store(e.fma(x, x, b.load(squares)), squares)
    count = b.sitofp(e.times(width, LANES), F32)
    mean = b.fadd(b.fdiv(e.total(b.load(squares)), count), epsilon)
    factor = e.splat(b.fdiv(F32(1.0), e.call("llvm.sqrt.f32", F32, mean)))
    with e.loop(width) as index:
        shift = e.times(index, 64)
        e.store(b.fmul(b.fmul(e.load(row, VF, shift), factor), e.load(weight, VF, shift)), out, shift)


def _rotate(context: Emit, row: Any, cosines: Any, sines: Any, half: Any, out: Any) -> None:
    """out = the head's first and second half, rotated against each other; half: width of one in sixteens."""
    e, b = context, context.builder
    second = e.times(half, 64)
    with e.loop(half) as index:
        shift = e.times(index, 64)
        x, y = e.load(row, VF, shift), e.load(e.at(row, second), VF, shift)
        c, s = e.load(cosines, VF, shift), e.load(sines, VF, shift)
        e.store(b.fsub(b.fmul(x, c), b.fmul(y, s)), out, shift)
        e.store(b.fadd(b.fmul(y, c), b.fmul(x, s)), e.at(out, second), shift)


def _gated(e: Emit, gate: Any, up: Any, out: Any, width: Any, inner: Any) -> None:
    b = e.builder
    with e.loop(width) as index:
        shift = e.times(index, 64)
        g = e.load(gate, VF, shift)
        share = b.fdiv(e.constant(1.0), b.fadd(e.constant(1.0), e.exp(b.fsub(e.constant(-0.0), inner(g)))))
        e.store(b.fmul(b.fmul(g, share), e.load(up, VF, shift)), out, shift)


def _silu(context: Emit, gate: Any, up: Any, out: Any, width: Any) -> None:
    """out = gate * sigmoid(gate) * up; width in sixteens."""
    _gated(context, gate, up, out, width, lambda g: g)


def _gelu(context: Emit, gate: Any, up: Any, out: Any, width: Any) -> None:
    """The tanh form of gelu(gate) * up: x (1 + tanh z) / 2 is x sigmoid(2 z)."""
    e, b = context, context.builder
    c = 2 * math.sqrt(2 / math.pi)

    def inner(g: Any) -> Any:
        return b.fmul(g, e.fma(b.fmul(g, g), e.constant(0.044715 * c), e.constant(c)))

    _gated(e, gate, up, out, width, inner)


def _scaled(context: Emit, row: Any, factor: Any, out: Any, width: Any, add: Any) -> None:
    """out = row * factor, or out + that; width in sixteens."""
    e, b = context, context.builder
    keep = e.splat(b.sitofp(add, F32))
    factor = e.splat(factor)
    with e.loop(width) as index:
        shift = e.times(index, 64)
        value = b.fmul(e.load(row, VF, shift), factor)
        old = b.select(b.fcmp_ordered(">", keep, e.constant(0.0)), e.load(out, VF, shift), e.constant(0.0))
        e.store(b.fadd(old, value), out, shift)


def _unpack_bytes(context: Emit, tile: Any, lane: Any, scale: Any, width: Any, out: Any) -> None:
    """One output's weights out of its int8 tile, as floats: the embedding of a token. width in sixteens."""
    e, b = context, context.builder
    factor = e.splat(scale)
    with e.loop(width) as index:
        group = e.at(e.at(tile, e.times(index, 4 * 64)), e.times(lane, 4))
        words: Any = ir.Constant(VI, [0] * LANES)
        for i in range(4):
            word = e.load(group, I32, 64 * i)
            for byte in range(4):
                value = b.sub(b.and_(b.lshr(word, I32(8 * byte)), I32(255)), I32(128))
                words = b.insert_element(words, value, I32(4 * i + byte))
        e.store(b.fmul(b.sitofp(words, VF), factor), out, e.times(index, 64))


normalise = instruction(types.void, _normalise)
rotate = instruction(types.void, _rotate)
silu = instruction(types.void, _silu)
gelu = instruction(types.void, _gelu)
scaled = instruction(types.void, _scaled)
unpack_bytes = instruction(types.void, _unpack_bytes)
