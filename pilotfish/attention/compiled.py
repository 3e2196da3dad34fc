"""Attention over paged keys in compiled loops, float32 on a CPU, where a row's result is a function of that row alone.

It does not know models. The one trick: keys are counted along the row's *own* text (a tree node's ancestors follow
the trunk directly, whatever siblings lie between them in the cache) and taken in blocks of 128 from the first. A score
is one chain of multiply-adds over the head's width, a value column one chain over the block's keys, and blocks are
merged in their order. So it does not matter which rows, heads or blocks a thread happens to compute together, and a
plain pass gives the same bits as any draft.

A block's keys are transposed first (`lift_keys`), 16 keys to a vector: every query of every row that sees them is then
a stream of multiply-adds without a sum across lanes.

Addresses everywhere; a slot's heads lie ``heads * dim`` floats after the slot before.
"""

import math
from typing import Any

import numpy as np
from numba import types

from .vectors import F32, I64, LANES, VF, Emit, Int, compiled, get_float, instruction, set_float

BLOCK = 128  # keys
UNSEEN = float("-inf")
_LINE = BLOCK * 4  # bytes of one input of the head, for all keys of a block


def _lift(context: Emit, keys: Any, offsets: Any, num_sixteens: Any, width: Any, out: Any) -> None:
    """out[d][j] = key j's d-th number. offsets: int64 per key, bytes from ``keys``. width: dim / 16."""
    e = context
    with e.loop(num_sixteens) as index:
        table, column = e.at(offsets, e.times(index, 8 * LANES)), e.times(index, 64)
        places = [e.at(keys, e.load(table, I64, 8 * lane)) for lane in range(LANES)]
        with e.loop(width) as part:
            shift = e.times(part, 64)
            rows = _transposed(e, [e.load(place, VF, shift) for place in places])
            first = e.at(e.at(out, e.times(part, LANES * _LINE)), column)
            for i, row in enumerate(rows):
                e.store(row, first, i * _LINE)


def _transposed(e: Emit, rows: list[Any]) -> list[Any]:
    """A 16 x 16 block turned over, in four rounds that swap ever smaller squares."""
    step = LANES // 2
    while step:
        keep = [i if not i & step else LANES + (i & ~step) for i in range(LANES)]
        swap = [(i | step) if not i & step else LANES + i for i in range(LANES)]
        turned = list(rows)
        for i in range(LANES):
            if not i & step:
                turned[i] = e.pick(rows[i], rows[i + step], keep)
                turned[i + step] = e.pick(rows[i], rows[i + step], swap)
        rows, step = turned, step // 2
    return rows


def _score(num: int) -> Any:
    """scores[i][j] = scale * (query i . key j) for ``num`` queries, each ``dim`` floats after the one before."""

    def write(context: Emit, queries: Any, lifted: Any, dim: Any, num_sixteens: Any, scale: Any, out: Any) -> None:
        e, b = context, context.builder
        stride, factor = e.times(dim, 4), e.splat(scale)

        def columns(first: Any, count: int) -> None:
            sums = [[e.variable(e.constant(0.0)) for _ in range(count)] for _ in range(num)]
            with e.loop(dim) as d:
                line = e.at(e.at(lifted, first), e.times(d, _LINE))
                keys = [e.load(line, VF, 64 * c) for c in range(count)]
                for i in range(num):
                    place = e.at(e.at(queries, e.times(stride, i)), e.times(d, 4))
                    query = e.splat(e.load(place, F32))
                    for c in range(count):
                        b.store(e.fma(query, keys[c], b.load(sums[i][c])), sums[i][c])
            for i in range(num):
                for c in range(count):
                    e.store(b.fmul(b.load(sums[i][c]), factor), e.at(out, first), i * _LINE + 64 * c)

        _by_fours(e, num_sixteens, columns)

    return instruction(types.void, write)


def _by_fours(e: Emit, width: Any, columns: Any) -> None:
    """columns(first byte, how many vectors) over a row of ``width`` vectors: four at a time, then one."""
    fours = e.builder.sdiv(width, I64(4))
    with e.loop(fours) as index:
        columns(e.times(index, 256), 4)
    with e.loop(e.builder.srem(width, I64(4))) as index:
        columns(e.builder.add(e.times(fours, 256), e.times(index, 64)), 1)


def _weigh(num: int) -> Any:
    """out[i] = sum over keys j of weights[i][j] * value j, for ``num`` rows of weights; key after key."""

    def write(context: Emit, weights: Any, values: Any, offsets: Any, num_keys: Any, width: Any, out: Any,
              out_stride: Any) -> None:  # fmt: skip
        e, b = context, context.builder

        def columns(first: Any, count: int) -> None:
            sums = [[e.variable(e.constant(0.0)) for _ in range(count)] for _ in range(num)]
            with e.loop(num_keys) as key:
                place = e.at(e.at(values, e.load(offsets, I64, e.times(key, 8))), first)
                parts = [e.load(place, VF, 64 * c) for c in range(count)]
                for i in range(num):
                    weight = e.splat(e.load(e.at(weights, i * _LINE), F32, e.times(key, 4)))
                    for c in range(count):
                        b.store(e.fma(weight, parts[c], b.load(sums[i][c])), sums[i][c])
            for i in range(num):
                for c in range(count):
                    e.store(b.load(sums[i][c]), e.at(e.at(out, e.times(out_stride, i)), first), 64 * c)

        _by_fours(e, width, columns)

    return instruction(types.void, write)


def _largest_of(context: Emit, values: Any, num_sixteens: Any) -> Any:
    e, b = context, context.builder
    best = e.variable(e.constant(UNSEEN))
    with e.loop(num_sixteens) as index:
        b.store(e.largest(b.load(best), e.load(values, VF, e.times(index, 64))), best)
    return e.reduce(b.load(best), lambda x, y: e.largest(x, y))


def _exponentials(context: Emit, values: Any, num_sixteens: Any, largest: Any) -> Any:
    """values become exp(values - largest); returns their sum."""
    e, b = context, context.builder
    total = e.variable(e.constant(0.0))
    with e.loop(num_sixteens) as index:
        place = e.at(values, e.times(index, 64))
        weight = e.exp(b.fsub(e.load(place, VF), e.splat(largest)))
        e.store(weight, place)
        b.store(b.fadd(b.load(total), weight), total)
    return e.total(b.load(total))


def _merge(context: Emit, into: Any, part: Any, keep: Any, take: Any, width: Any) -> None:
    """into = into * keep + part * take."""
    e, b = context, context.builder
    keep, take = e.splat(keep), e.splat(take)
    with e.loop(width) as index:
        place = e.at(into, e.times(index, 64))
        old = b.fmul(e.load(place, VF), keep)
        e.store(e.fma(e.load(part, VF, e.times(index, 64)), take, old), place)


lift = instruction(types.void, _lift)
largest_of = instruction(types.float32, _largest_of)
exponentials = instruction(types.float32, _exponentials)
merge_rows = instruction(types.void, _merge)
_score_1, _score_2, _score_3, _score_4 = (_score(num) for num in (1, 2, 3, 4))
_weigh_1, _weigh_2, _weigh_3, _weigh_4 = (_weigh(num) for num in (1, 2, 3, 4))


@compiled
def lift_keys(slots: Any, first: Int, stop: Int, keys: Int, stride: Int, width: Int, offsets: Int, out: Int) -> None:
    """Offsets of the trunk's keys first..stop-1 (of one block), and these keys transposed.

    slots: of the sequence. stride: bytes between slots. offsets: room for int64 per key of a block.
    """
    place = np.int64(0)
    for key in range(first, stop):
        set_offset(offsets, place, slots[key] * stride)
        place += 1
    last = slots[stop - 1] * stride
    while place % 16:  # whole vectors: a valid place, whatever is there
        set_offset(offsets, place, last)
        place += 1
    lift(keys, offsets, place // 16, width, out)


def _set_offset(context: Emit, table: Any, index: Any, value: Any) -> None:
    context.store(value, table, context.times(index, 8))


set_offset = instruction(types.void, _set_offset)


@compiled
def lift_nodes(slots: Any, prefix: Int, bits: Int, first: Int, stop: Int, keys: Int, stride: Int, dim: Int,
               offsets: Int, out: Int) -> None:  # fmt: skip
    """As `lift_keys` for the part of a row's own keys that are tree nodes: those from ``prefix`` on, the set bits.

    first, stop: the row's keys that lie in the block. Writes columns that trunk rows of the block do not look at.
    """
    key, node = prefix, 0
    while key < stop:
        if (bits >> node) & 1:
            if key >= first:
                place = slots[prefix + node] * stride
                set_offset(offsets, key - first, place)
                for d in range(dim):
                    set_float(out + d * BLOCK * 4 + (key - first) * 4, get_float(keys + place + 4 * d))
            key += 1
        node += 1


@compiled
def attend_block(queries: Int, num: Int, lifted: Int, values: Int, offsets: Int, num_keys: Int, num_unseen: Int,
                 dim: Int, scale: Any, scores: Int, out: Int) -> None:  # fmt: skip
    """Partial softmaxes of up to 4 heads of one row over one block: each ``dim + 2`` floats at ``out``: the weighted
    sum of values, the largest score, the sum of weights.

    num_unseen: first keys of the block that the window hides. scores: room for 4 blocks of floats.
    """
    sixteens, width, stride = (num_keys + 15) // 16, dim // 16, (dim + 2) * 4
    if num == 1:
        _score_1(queries, lifted, dim, sixteens, scale, scores)
    elif num == 2:
        _score_2(queries, lifted, dim, sixteens, scale, scores)
    elif num == 3:
        _score_3(queries, lifted, dim, sixteens, scale, scores)
    else:
        _score_4(queries, lifted, dim, sixteens, scale, scores)
    for i in range(num):
        row = scores + i * BLOCK * 4
        for key in range(num_unseen):
            set_float(row + 4 * key, UNSEEN)
        for key in range(num_keys, sixteens * 16):
            set_float(row + 4 * key, UNSEEN)
        largest = largest_of(row, sixteens)
        set_float(out + i * stride + 4 * dim, largest)
        set_float(out + i * stride + 4 * dim + 4, exponentials(row, sixteens, largest))
    seen, table, weights = num_keys - num_unseen, offsets + 8 * num_unseen, scores + 4 * num_unseen
    if num == 1:
        _weigh_1(weights, values, table, seen, width, out, stride)
    elif num == 2:
        _weigh_2(weights, values, table, seen, width, out, stride)
    elif num == 3:
        _weigh_3(weights, values, table, seen, width, out, stride)
    else:
        _weigh_4(weights, values, table, seen, width, out, stride)


@compiled
def merge_block(into: Int, part: Int, dim: Int) -> None:
    """Take one more block's partial softmax into the row's running one (whose largest starts at -inf, sums at 0)."""
    a, b = get_float(into + 4 * dim), get_float(part + 4 * dim)
    largest = a + b if math.isnan(a) or math.isnan(b) else max(a, b)
    keep, take = np.float32(math.exp(a - largest)), np.float32(math.exp(b - largest))
    merge_rows(into, part, keep, take, dim // 16)
    set_float(into + 4 * dim, largest)
    set_float(into + 4 * dim + 4, get_float(into + 4 * dim + 4) * keep + get_float(part + 4 * dim + 4) * take)
