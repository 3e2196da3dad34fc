"""Products of quantised rows with packed int8 or int4 weights: 16 outputs at a time, any number of rows.

It does not know layers or files. The one trick: weights are stored *unsigned* (above a zero point, or a minimum) and
activations signed, which is what the CPU's byte product wants, and then the zero point's or minimum's part of a sum
needs one number per row and group, the sum of the row's own bytes. So weights need no correction terms, and a row's
result is a function of that row alone, bit for bit: integer sums are exact, and the few float steps are the same for
1 row and for 8.

    rows         blocks of 8: [K / 4][8 rows][4 inputs] int8, so that one pointer reaches all; and per block
                 [K / 32][8 rows] scales (float32), one for each row's group of 32 inputs, and [K / 32][2][8 rows]
                 of the group's sums, -128 x them (int32, where int8's begin) and as they are (float32, for int4)
    int8 tile    [K / 4][16 outputs][4 inputs] bytes, weight + 128; one scale per output
    grouped      the same bytes; per group 16 scales (float16), one for each output
    int4 tile    [K / 8][16 outputs][4 inputs] bytes, the first 4 inputs in the low halves, the next 4 in the high
                 ones, 0 to 15; per group 16 scales and 16 minimums (float16): weight = scale x number + minimum
"""

import functools
from typing import Any

from llvmlite import ir
from numba import types

from ..attention.vectors import DOT_KIND, F32, I32, LANES, V8, VF, VI, DotKind, Emit, Int, compiled, instruction

GROUP = 32  # inputs that share one activation scale
ROWS = 8  # of a block
SUMS_LINE = 8 * ROWS  # bytes of a block's sums, of one group
ZERO_POINT = 128  # of int8 weights
V16, VH = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)
GROUPED = 9  # "bits" of a matrix whose bytes are int8's and whose scales are one per output and group
SCALE_BYTES = {4: 4 * LANES, GROUPED: 2 * LANES}  # of one group; an int8 tile has one line of float32
TILE_BYTES = {8: LANES * GROUP, 4: LANES * GROUP // 2, GROUPED: LANES * GROUP}  # of one group


def tile_product(bits: int, rows: int, kind: DotKind = DOT_KIND) -> Any:
    """The instruction for one tile and this many rows; out (or, with ``add``, out +) = row @ weights + bias."""

    def write(
        context: Emit,
        weights: Any,
        scales: Any,
        bias: Any,
        row: Any,
        row_scales: Any,
        row_sums: Any,
        out: Any,
        out_stride: Any,
        num_groups: Any,
        add: Any,
    ) -> None:
        e, b = context, context.builder
        totals = [e.variable(e.constant(0.0)) for _ in range(rows)]
        with e.loop(num_groups) as group:
            first_scale, first_sum = (
                e.at(row_scales, e.times(group, 4 * ROWS)),
                e.at(row_sums, e.times(group, SUMS_LINE)),
            )
            sums: list[Any] = [ir.Constant(VI, [0] * LANES)] * rows
            if bits != 4:
                sums = [e.splat(e.load(first_sum, I32, 4 * m)) for m in range(rows)]
            data = e.at(row, e.times(group, GROUP * ROWS))
            tile = e.at(weights, e.times(group, TILE_BYTES[bits]))
            for step in range(GROUP // 4):
                values = _weights(e, tile, step, bits)
                for m in range(rows):
                    four = e.splat(e.load(data, I32, 4 * ROWS * step + 4 * m))
                    sums[m] = e.dot_bytes(sums[m], values, four, kind)
            if bits != 8:
                halves = e.at(scales, e.times(group, SCALE_BYTES[bits]))
                factors = from_half(e, halves, kind)
            if bits == 4:
                minimums = from_half(e, e.at(halves, 2 * LANES), kind)
            for m in range(rows):
                value = b.sitofp(sums[m], VF)
                if bits != 8:
                    value = b.fmul(value, factors)
                if bits == 4:
                    own_sum = e.splat(e.load(first_sum, F32, 4 * ROWS + 4 * m))
                    value = e.fma(minimums, own_sum, value)
                scale = e.splat(e.load(first_scale, F32, 4 * m))
                b.store(e.fma(value, scale, b.load(totals[m])), totals[m])
        shift, factor = e.load(bias, VF), e.load(scales, VF)
        for m in range(rows):
            value = b.load(totals[m])
            value = e.fma(value, factor, shift) if bits == 8 else b.fadd(value, shift)
            place = e.at(out, e.times(out_stride, m))
            with b.if_then(b.icmp_signed("!=", add, add.type(0))):
                e.store(b.fadd(e.load(place, VF), value), place)
            with b.if_then(b.icmp_signed("==", add, add.type(0))):
                e.store(value, place)

    return instruction(types.void, write)


def _weights(e: Emit, tile: Any, step: int, bits: int) -> Any:
    """4 inputs of 16 outputs as unsigned bytes."""
    if bits != 4:
        return e.load(tile, VI, 64 * step)
    packed = e.load(tile, VI, 64 * (step // 2))
    if step % 2:
        packed = e.builder.lshr(packed, ir.Constant(VI, [4] * LANES))
    return e.builder.and_(packed, ir.Constant(VI, [0x0F0F0F0F] * LANES))


def from_half(e: Emit, address: Any, kind: DotKind) -> Any:
    """16 float16 as float32: exact, and one instruction on any CPU that has one."""
    b = e.builder
    if kind != "plain":
        return b.fpext(e.load(address, VH), VF)
    # A CPU without such an instruction would call a function that is not there. So: bits in place, then the exponent.
    wide = b.zext(e.load(address, V16), VI)
    size = b.shl(b.and_(wide, ir.Constant(VI, [0x7FFF] * LANES)), ir.Constant(VI, [13] * LANES))
    sign = b.shl(b.and_(wide, ir.Constant(VI, [0x8000] * LANES)), ir.Constant(VI, [16] * LANES))
    size = b.bitcast(b.fmul(b.bitcast(size, VF), e.constant(2.0**112)), VI)
    return b.bitcast(b.or_(size, sign), VF)


def _quantise_group(context: Emit, values: Any, out: Any, scale: Any, total: Any) -> None:
    """GROUP floats to bytes in +-127, their scale, and their sum twice. A NaN or an infinity makes the scale one.

    The bytes go to ``out`` in words of 4, a block's line apart.
    """
    e, b = context, context.builder
    parts = [e.load(values, VF, 64 * i) for i in range(GROUP // LANES)]
    sizes = [e.magnitude(part) for part in parts]
    largest = e.reduce(functools.reduce(e.largest, sizes), e.largest)
    e.store(b.fmul(largest, F32(1 / 127)), scale)
    positive = b.fcmp_ordered(">", largest, F32(0.0))
    usable = b.and_(positive, b.fcmp_ordered("<", largest, F32(3.0e38)))
    inverse = e.splat(b.select(usable, b.fdiv(F32(127.0), largest), F32(0.0)))
    sums: Any = ir.Constant(VI, [0] * LANES)
    for i, part in enumerate(parts):
        number = b.select(e.splat(usable), b.fmul(part, inverse), e.constant(0.0))
        whole = b.fptosi(e.whole(number), VI)
        words = b.bitcast(b.trunc(whole, V8), ir.VectorType(I32, 4))
        for j in range(4):
            e.store(b.extract_element(words, I32(j)), out, 4 * ROWS * (4 * i + j))
        sums = b.add(sums, whole)
    whole_sum = e.total(sums)
    e.store(b.mul(whole_sum, I32(-ZERO_POINT)), total)
    e.store(b.sitofp(whole_sum, F32), total, 4 * ROWS)


def _unpack_halves(context: Emit, halves: Any, out: Any) -> None:
    """16 float16 to floats."""
    context.store(from_half(context, halves, DOT_KIND), out)


quantise_group = instruction(types.void, _quantise_group)
unpack_halves = instruction(types.void, _unpack_halves)

_MOST_ROWS = 8 if DOT_KIND == "vnni512" else 4  # more do not fit the registers
_int8 = [tile_product(8, rows) for rows in range(1, ROWS + 1)]
_int4 = [tile_product(4, rows) for rows in range(1, ROWS + 1)]
_grouped = [tile_product(GROUPED, rows) for rows in range(1, ROWS + 1)]
_int8_1, _int8_2, _int8_3, _int8_4, _int8_5, _int8_6, _int8_7, _int8_8 = _int8
_int4_1, _int4_2, _int4_3, _int4_4, _int4_5, _int4_6, _int4_7, _int4_8 = _int4
_grouped_1, _grouped_2, _grouped_3, _grouped_4, _grouped_5, _grouped_6, _grouped_7, _grouped_8 = _grouped


@compiled
def _int8_rows(
    w: Int, s: Int, b: Int, rows: Int, r: Int, rs: Int, rt: Int, o: Int, stride: Int, n: Int, add: Int
) -> None:
    if rows == 1:
        _int8_1(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 2:
        _int8_2(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 3:
        _int8_3(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 4:
        _int8_4(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 5:
        _int8_5(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 6:
        _int8_6(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 7:
        _int8_7(w, s, b, r, rs, rt, o, stride, n, add)
    else:
        _int8_8(w, s, b, r, rs, rt, o, stride, n, add)


@compiled
def _int4_rows(
    w: Int, s: Int, b: Int, rows: Int, r: Int, rs: Int, rt: Int, o: Int, stride: Int, n: Int, add: Int
) -> None:
    if rows == 1:
        _int4_1(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 2:
        _int4_2(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 3:
        _int4_3(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 4:
        _int4_4(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 5:
        _int4_5(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 6:
        _int4_6(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 7:
        _int4_7(w, s, b, r, rs, rt, o, stride, n, add)
    else:
        _int4_8(w, s, b, r, rs, rt, o, stride, n, add)


@compiled
def _grouped_rows(
    w: Int, s: Int, b: Int, rows: Int, r: Int, rs: Int, rt: Int, o: Int, stride: Int, n: Int, add: Int
) -> None:
    if rows == 1:
        _grouped_1(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 2:
        _grouped_2(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 3:
        _grouped_3(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 4:
        _grouped_4(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 5:
        _grouped_5(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 6:
        _grouped_6(w, s, b, r, rs, rt, o, stride, n, add)
    elif rows == 7:
        _grouped_7(w, s, b, r, rs, rt, o, stride, n, add)
    else:
        _grouped_8(w, s, b, r, rs, rt, o, stride, n, add)


@compiled
def multiply_tile(
    bits: Int,
    weights: Int,
    scales: Int,
    bias: Int,
    num_rows: Int,
    row: Int,
    row_scales: Int,
    row_sums: Int,
    num_groups: Int,
    out: Int,
    out_stride: Int,
    add: Int,
) -> None:
    """One tile's 16 outputs for all rows; addresses everywhere. row, row_scales, row_sums: blocks of rows."""
    done = 0
    while done < num_rows:
        block, place = done // ROWS, done % ROWS
        # Equal parts: a row alone waits for its own sums, and costs nearly what four do.
        left = min(num_rows - block * ROWS, ROWS) - place
        parts = (left + _MOST_ROWS - 1) // _MOST_ROWS
        rows = (left + parts - 1) // parts
        r = row + block * num_groups * GROUP * ROWS + place * 4
        s = row_scales + block * num_groups * 4 * ROWS + place * 4
        t = row_sums + block * num_groups * SUMS_LINE + place * 4
        o = out + done * out_stride
        if bits == 8:
            _int8_rows(weights, scales, bias, rows, r, s, t, o, out_stride, num_groups, add)
        elif bits == 4:
            _int4_rows(weights, scales, bias, rows, r, s, t, o, out_stride, num_groups, add)
        else:
            _grouped_rows(weights, scales, bias, rows, r, s, t, o, out_stride, num_groups, add)
        done += rows


@compiled
def tile_bytes(bits: Int, num_groups: Int) -> Int:
    """Bytes of a tile's weights."""
    return num_groups * (LANES * GROUP // 2 if bits == 4 else LANES * GROUP)


@compiled
def scale_bytes(bits: Int, num_groups: Int) -> Int:
    """Bytes of a tile's scales, and minimums if it has some."""
    return 4 * LANES if bits == 8 else num_groups * (4 * LANES if bits == 4 else 2 * LANES)


@compiled
def quantise_row(values: Int, row: Int, first: Int, stop: Int, num_groups: Int, data: Int, scales: Int,
                 sums: Int) -> None:  # fmt: skip
    """Groups first..stop-1 of the floats at ``values`` into row number ``row`` of the blocks at data, scales, sums."""
    block, place = row // ROWS * num_groups, row % ROWS * 4
    for group in range(first, stop):
        line = block + group
        quantise_group(
            values + group * GROUP * 4,
            data + line * GROUP * ROWS + place,
            scales + line * 4 * ROWS + place,
            sums + line * SUMS_LINE + place,
        )
