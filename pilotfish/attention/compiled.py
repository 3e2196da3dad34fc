"""Attention over paged keys in compiled loops, float32 on a CPU, where a row's result is a function of that row alone.

It does not know models. The one trick: keys are counted along the row's *own* text (a tree node's ancestors follow
the trunk directly, whatever siblings lie between them in the cache), taken in blocks of 256 from the first, and the
blocks' partial softmaxes are merged in that order. So the sums are the same for a plain pass and for any draft, and
blocks of a long text may still be computed by different threads.

Addresses everywhere; a slot's heads lie ``heads * dim`` floats after the slot before.
"""

import math
from typing import Any

from numba import njit, types

from .vectors import F32, I64, LANES, VF, Emit, get_float, instruction, set_float

BLOCK = 256  # keys
UNSEEN = float("-inf")


def _score_keys(context: Emit, query: Any, keys: Any, offsets: Any, num_sixteens: Any, width: Any, scale: Any,
                out: Any) -> None:  # fmt: skip
    """out[j] = scale * (query . key j) for 16 keys at a time. offsets: int64, bytes from ``keys``. width: dim / 16."""
    e, b = context, context.builder
    with e.loop(num_sixteens) as index:
        table = e.at(offsets, e.times(index, 8 * LANES))
        places = [e.at(keys, e.load(table, I64, 8 * lane)) for lane in range(LANES)]
        sums = [e.variable(e.constant(0.0)) for _ in range(LANES)]
        for lane in range(LANES):
            b.store(e.constant(0.0), sums[lane])
        with e.loop(width) as part:
            shift = e.times(part, 64)
            q = e.load(query, VF, shift)
            for lane in range(LANES):
                b.store(e.fma(q, e.load(places[lane], VF, shift), b.load(sums[lane])), sums[lane])
        total = _transposed_sum(e, [b.load(value) for value in sums])
        e.store(b.fmul(total, e.splat(scale)), out, e.times(index, 64))


def _transposed_sum(e: Emit, vectors: list[Any]) -> Any:
    """Lane i of the result is the sum of the lanes of vectors[i]: four rounds of "add neighbours, keep both"."""
    step = 1
    while len(vectors) > 1:
        merged = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            # lanes whose bit `step` is clear come from a, the others from b
            kept = [i if not i & step else LANES + (i & ~step) for i in range(LANES)]
            moved = [(i | step) if not i & step else LANES + i for i in range(LANES)]
            merged.append(e.builder.fadd(e.pick(a, b, kept), e.pick(a, b, moved)))
        vectors, step = merged, step * 2
    return vectors[0]


def _largest_of(context: Emit, values: Any, num_sixteens: Any) -> Any:
    e, b = context, context.builder
    best = e.variable(e.constant(UNSEEN))
    b.store(e.constant(UNSEEN), best)
    with e.loop(num_sixteens) as index:
        b.store(e.largest(b.load(best), e.load(values, VF, e.times(index, 64))), best)
    return e.reduce(b.load(best), lambda x, y: e.largest(x, y))


def _exponentials(context: Emit, values: Any, num_sixteens: Any, largest: Any) -> Any:
    """values become exp(values - largest); returns their sum."""
    e, b = context, context.builder
    total = e.variable(e.constant(0.0))
    b.store(e.constant(0.0), total)
    with e.loop(num_sixteens) as index:
        place = e.at(values, e.times(index, 64))
        weight = e.exp(b.fsub(e.load(place, VF), e.splat(largest)))
        e.store(weight, place)
        b.store(b.fadd(b.load(total), weight), total)
    return e.total(b.load(total))


def _weighted_sum(context: Emit, weights: Any, values: Any, offsets: Any, num_keys: Any, width: Any,
                  out: Any) -> None:  # fmt: skip
    """out = sum of weights[j] * value j, key after key; 64 columns at a time, then 16."""
    e, b = context, context.builder

    def columns(first: Any, num: int) -> None:
        sums = [e.variable(e.constant(0.0)) for _ in range(num)]
        for value in sums:
            b.store(e.constant(0.0), value)
        with e.loop(num_keys) as key:
            weight = e.splat(e.load(weights, F32, e.times(key, 4)))
            place = e.at(e.at(values, e.load(offsets, I64, e.times(key, 8))), first)
            for i, value in enumerate(sums):
                b.store(e.fma(weight, e.load(place, VF, 64 * i), b.load(value)), value)
        for i, value in enumerate(sums):
            e.store(b.load(value), e.at(out, first), 64 * i)

    quads = b.sdiv(width, I64(4))
    with e.loop(quads) as quad:
        columns(e.times(quad, 256), 4)
    with e.loop(b.srem(width, I64(4))) as rest:
        columns(b.add(e.times(quads, 256), e.times(rest, 64)), 1)


score_keys = instruction(types.void, _score_keys)
largest_of = instruction(types.float32, _largest_of)
exponentials = instruction(types.float32, _exponentials)
weighted_sum = instruction(types.void, _weighted_sum)


def _merge(context: Emit, into: Any, part: Any, keep: Any, take: Any, width: Any) -> None:
    """into = into * keep + part * take."""
    e, b = context, context.builder
    keep, take = e.splat(keep), e.splat(take)
    with e.loop(width) as index:
        place = e.at(into, e.times(index, 64))
        old = b.fmul(e.load(place, VF), keep)
        e.store(e.fma(e.load(part, VF, e.times(index, 64)), take, old), place)


merge_rows = instruction(types.void, _merge)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def key_offsets(slots: Any, prefix: int, bits: int, first: int, stop: int, stride: int, out: Any) -> None:
    """Bytes of a row's own keys first..stop-1, filled up to a multiple of 16 with the last one (a valid place).

    slots: of the row's span. prefix: keys from the first that the row sees. bits: the nodes behind ``prefix`` that it
    sees.
    """
    place = 0
    for key in range(first, min(stop, prefix)):
        out[place] = slots[key] * stride
        place += 1
    if stop > prefix:
        skip, node = max(0, first - prefix), 0
        while place < stop - first:
            if (bits >> node) & 1:
                if skip > 0:
                    skip -= 1
                else:
                    out[place] = slots[prefix + node] * stride
                    place += 1
            node += 1
    while place % 16:
        out[place] = out[place - 1]
        place += 1


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def attend_block(query: int, keys: int, values: int, offsets: Any, num_keys: int, num_unseen: int, dim: int,
                 scale: float, scores: Any, out: int) -> None:  # fmt: skip
    """One head's partial softmax over one block: [largest, sum, weighted sum of values] as dim + 2 floats at out.

    The sum lies behind the ``dim`` columns. num_unseen: first keys of the block that the window hides.
    """
    sixteens, width, address = (num_keys + 15) // 16, dim // 16, scores.ctypes.data
    score_keys(query, keys, offsets.ctypes.data, sixteens, width, scale, address)
    for key in range(num_unseen):
        scores[key] = UNSEEN
    for key in range(num_keys, sixteens * 16):
        scores[key] = UNSEEN
    largest = largest_of(address, sixteens)
    total = exponentials(address, sixteens, largest)
    weighted_sum(
        address + 4 * num_unseen, values, offsets.ctypes.data + 8 * num_unseen, num_keys - num_unseen, width, out
    )
    set_float(out + 4 * dim, largest)
    set_float(out + 4 * dim + 4, total)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def merge_block(into: int, part: int, dim: int) -> None:
    """Take one more block's partial softmax into the row's running one (whose largest starts at -inf, sums at 0)."""
    a, b = get_float(into + 4 * dim), get_float(part + 4 * dim)
    if math.isnan(a) or math.isnan(b):
        largest = a + b
    else:
        largest = max(a, b)
    keep, take = math.exp(a - largest), math.exp(b - largest)
    merge_rows(into, part, keep, take, dim // 16)
    set_float(into + 4 * dim, largest)
    set_float(into + 4 * dim + 4, get_float(into + 4 * dim + 4) * keep + get_float(part + 4 * dim + 4) * take)
