"""The whole pass of a quantised decoder as one compiled function, run by all threads of a team together.

It does not know files, requests or torch. The one trick is that a pass is one call: between the token ids that go in
and the logits that come out there is no Python, no dispatch and no allocation. Each layer is ten phases
(`team`): norm and quantise, product, rotate and write keys, attend, quantise, product, norm and quantise, product,
activate and quantise, product. Each job of a phase works on whole rows, or on 16 outputs of all rows, in an order
that no other row can change.

T rows, N wanted rows, H heads, G key heads, D head width. Addresses are int64.
"""

from typing import Any

import numpy as np

from ..attention.compiled import BLOCK, attend_block, lift_keys, lift_nodes, merge_block
from ..attention.vectors import Int, compiled, get_float, set_float
from .products import GROUP, multiply_tile, quantise_row, scale_bytes, tile_bytes, unpack_halves
from .rowwise import gelu, normalise, rotate, scaled, silu, unpack_bytes
from .team import finish, take

# Columns of the table of layers: one row per layer. A matrix takes four: weights, scales, bias, bits.
QKV, OUT, GATE_UP, DOWN = 0, 4, 8, 12
NORM_1, NORM_2, POST_1, POST_2, Q_NORM, K_NORM, KEYS, VALUES, WINDOW, ROPE, TAP, EMBEDDING_NORM = range(16, 28)
NUM_COLUMNS = 28
# Entries of `sizes`.
HIDDEN, NUM_HEADS, NUM_KEY_HEADS, DIM, INTERMEDIATE, VOCAB, GELU, SCRATCH_BYTES, JOINED = range(9)
PHASES_A_LAYER, OTHER_PHASES = 10, 6
ROWS_A_GROUP = 16  # that one job of attention takes along a block of keys
_TILES_A_JOB = 4
_ACTIVATION_GROUPS_A_JOB = 16


# -- phases ------------------------------------------------------------------------------------------------------
#
# `b` is the table of buffers (addresses; `quantized` lays it out); a buffer's rows lie `stride` floats apart.

X, NORMED, BYTES, SCALES, SUMS, WIDE, QUERIES, ATTENDED, ACTIVE, PARTS, LOGITS, SCRATCH, COSINES, SINES = range(14)
# Cosines and sines come in pairs, one per rotation table: Gemma 3 has two.
STATES, EMBEDDED, BEST = range(COSINES + 4, COSINES + 7)
NUM_BUFFERS = BEST + 1


@compiled
def _groups(width: Int) -> Int:
    return (width + GROUP - 1) // GROUP


@compiled
def stride_of(width: Int) -> Int:
    """Floats from one row of a buffer to the next. One vector too many: rows whole pages apart would fight for the
    same few lines of the cache."""
    return _groups(width) * GROUP + 16


@compiled
def _quantise(b: Any, row: Int, values: Int, first: Int, stop: Int, num_groups: Int) -> None:
    """Groups first..stop-1 of a row of floats at ``values`` into the row's bytes, scales and sums."""
    quantise_row(values, row, first, stop, num_groups, b[BYTES], b[SCALES], b[SUMS])


@compiled
def _product(phase: Int, b: Any, matrix: Any, num_rows: Int, inputs: Int, outputs: Int, out: Int, stride: Int,
             add: Int) -> Int:  # fmt: skip
    """All quantised rows times one matrix. matrix: weights, scales, bias, bits."""
    num_groups, num_tiles, bits = _groups(inputs), (outputs + 15) // 16, matrix[3]
    tile_size, scale_size = tile_bytes(bits, num_groups), scale_bytes(bits, num_groups)
    num_jobs, num_done = (num_tiles + _TILES_A_JOB - 1) // _TILES_A_JOB, 0
    while True:
        job = take(phase)
        if job >= num_jobs:
            break
        for tile in range(job * _TILES_A_JOB, min(num_tiles, (job + 1) * _TILES_A_JOB)):
            multiply_tile(
                bits,
                matrix[0] + tile * tile_size,
                matrix[1] + tile * scale_size,
                matrix[2] + tile * 64,
                num_rows,
                b[BYTES],
                b[SCALES],
                b[SUMS],
                num_groups,
                out + tile * 64,
                stride * 4,
                add,
            )
        num_done += 1
    return finish(phase, num_jobs, num_done)


@compiled
def _add_normalised(b: Any, row: Int, weight: Int, hidden: Int, stride: Int, epsilon: Any) -> None:
    """x += norm(what the last product gave): the post-norms of Gemma 3."""
    scratch = b[NORMED] + row * stride * 4
    normalise(b[WIDE] + row * stride * 4, weight, hidden // 16, epsilon, scratch)
    scaled(scratch, 1.0, b[X] + row * stride * 4, hidden // 16, 1)


@compiled
def _norm_phase(phase: Int, b: Any, sizes: Any, num_rows: Int, weight: Int, post: Int, tap: Int,
                epsilon: Any) -> Int:  # fmt: skip
    """x to quantised norm(x), row by row. post: weight of the norm of what is still to be added to x, 0 if nothing
    is. tap: where x is copied to, 0 if nowhere."""
    hidden, num_done = sizes[HIDDEN], 0
    num_groups = _groups(hidden)
    stride = stride_of(hidden)
    while True:
        row = take(phase)
        if row >= num_rows:
            break
        x, normed = b[X] + row * stride * 4, b[NORMED] + row * stride * 4
        if post:
            _add_normalised(b, row, post, hidden, stride, epsilon)
        if tap:
            scaled(x, 1.0, tap + row * hidden * 4, hidden // 16, 0)
        if weight:
            normalise(x, weight, hidden // 16, epsilon, normed)
            _quantise(b, row, normed, np.int64(0), num_groups, num_groups)
        num_done += 1
    return finish(phase, num_rows, num_done)


@compiled
def _rotate_phase(phase: Int, b: Any, sizes: Any, layer: Any, positions: Any, slots: Any, epsilon: Any) -> Int:
    """Queries rotated into their buffer; keys rotated, and values as they are, into the cache's slots."""
    dim, num_heads, num_key_heads = sizes[DIM], sizes[NUM_HEADS], sizes[NUM_KEY_HEADS]
    width = (num_heads + 2 * num_key_heads) * dim
    half, num_done, num_rows = dim // 32, 0, len(positions)
    table = layer[ROPE] * 2
    while True:
        row = take(phase)
        if row >= num_rows:
            break
        cosines = b[COSINES + table] + positions[row] * (dim // 2) * 4
        sines = b[SINES + table] + positions[row] * (dim // 2) * 4
        start = b[WIDE] + row * stride_of(width) * 4
        for head in range(num_heads + num_key_heads):
            source = start + head * dim * 4
            norm = layer[Q_NORM] if head < num_heads else layer[K_NORM]
            if norm:
                normalise(source, norm, dim // 16, epsilon, source)
            if head < num_heads:
                out = b[QUERIES] + (row * num_heads + head) * dim * 4
            else:
                out = layer[KEYS] + (slots[row] * num_key_heads + head - num_heads) * dim * 4
            rotate(source, cosines, sines, half, out)
        values = start + (num_heads + num_key_heads) * dim * 4
        scaled(values, 1.0, layer[VALUES] + slots[row] * num_key_heads * dim * 4, num_key_heads * dim // 16, 0)
        num_done += 1
    return finish(phase, num_rows, num_done)


@compiled
def _clear(state: Int, num: Int, dim: Int) -> None:
    """``num`` empty softmaxes: nothing seen, nothing summed."""
    for i in range(num):
        place = state + i * (dim + 2) * 4
        for column in range(dim):
            set_float(place + 4 * column, 0.0)
        set_float(place + 4 * dim, -np.inf)
        set_float(place + 4 * dim + 4, 0.0)


@compiled
def _attend_rows(b: Any, sizes: Any, layer: Any, rows: Any, group: Any, key_head: Int, first: Int, stop: Int,
                 scale: Any, scratch: Int) -> None:  # fmt: skip
    """Blocks first..stop-1 of one key head for the rows of one group, merged into the states in ``scratch``.

    rows: (prefixes, ancestor bits, slot table) of the pass. group: first row, end, start in the slot table.
    """
    prefixes, bits, table = rows
    dim, num_key_heads, window = sizes[DIM], sizes[NUM_KEY_HEADS], layer[WINDOW]
    repeats, slots, stride = sizes[NUM_HEADS] // num_key_heads, table[group[2] :], num_key_heads * dim * 4
    keys, values = layer[KEYS] + key_head * dim * 4, layer[VALUES] + key_head * dim * 4
    offsets, scores, parts, lifted, states = _scratch_parts(scratch, dim)
    longest = prefixes[group[0] : group[1]].max()
    for block in range(first, stop):
        begin = block * BLOCK
        if begin < longest:
            trunk_end = min(longest, begin + BLOCK)
            lift_keys(slots, begin, trunk_end, keys, stride, dim // 16, offsets, lifted)
        for row in range(group[0], group[1]):
            num_keys = prefixes[row] + _count(bits[row])
            end = min(num_keys, begin + BLOCK)
            unseen = max(0, num_keys - window - begin) if window else np.int64(0)
            if end - begin <= unseen:
                continue
            if end > prefixes[row]:
                lift_nodes(slots, prefixes[row], bits[row], begin, end, keys, stride, dim, offsets, lifted)
            for i in range(0, repeats, 4):
                num = min(4, repeats - i)
                query = b[QUERIES] + (row * sizes[NUM_HEADS] + key_head * repeats + i) * dim * 4
                attend_block(query, num, lifted, values, offsets, end - begin, unseen, dim, scale, scores, parts)
                state = states + ((row - group[0]) * repeats + i) * (dim + 2) * 4
                for j in range(num):
                    merge_block(state + j * (dim + 2) * 4, parts + j * (dim + 2) * 4, dim)


@compiled
def _scratch_parts(scratch: Int, dim: Int) -> Any:
    """Where in a thread's scratch memory the offsets, scores, partial softmaxes, transposed keys and states lie."""
    offsets = scratch
    scores = offsets + BLOCK * 8
    parts = scores + 4 * BLOCK * 4
    lifted = parts + (4 * (dim + 2) * 4 + 63) // 64 * 64
    return offsets, scores, parts, lifted, lifted + dim * BLOCK * 4


def scratch_bytes(dim: int, repeats: int) -> int:
    """Bytes of scratch memory that a thread needs; repeats: query heads per key head."""
    floats = 6 * BLOCK + 4 * (dim + 2) + 16 + dim * BLOCK + ROWS_A_GROUP * repeats * (dim + 2)
    return -(-4 * floats // 4096) * 4096


@compiled
def _count(bits: Int) -> Int:
    num = 0
    while bits:
        bits &= bits - 1
        num += 1
    return num


@compiled
def _attend_phase(phase: Int, b: Any, sizes: Any, layer: Any, rows: Any, groups: Any, num_splits: Int, scale: Any,
                  scratch: Int) -> Int:  # fmt: skip
    """Every group and key head; where there are few of them, every block of keys too."""
    dim, num_heads, num_key_heads = sizes[DIM], sizes[NUM_HEADS], sizes[NUM_KEY_HEADS]
    repeats, num_done = num_heads // num_key_heads, 0
    num_jobs = len(groups) * num_key_heads * num_splits
    while True:
        job = take(phase)
        if job >= num_jobs:
            break
        group, rest = groups[job // (num_key_heads * num_splits)], job % (num_key_heads * num_splits)
        split, key_head = rest // num_key_heads, rest % num_key_heads  # neighbours in memory one after the other
        num_rows = group[1] - group[0]
        mine = _scratch_parts(scratch, dim)[4]
        _clear(mine, num_rows * repeats, dim)
        first, stop = (split, split + 1) if num_splits > 1 else (np.int64(0), group[3])
        _attend_rows(b, sizes, layer, rows, group, key_head, first, stop, scale, scratch)
        for i in range(num_rows * repeats):
            row, head = group[0] + i // repeats, key_head * repeats + i % repeats
            state = mine + i * (dim + 2) * 4
            if num_splits > 1:
                part = b[PARTS] + ((row * num_heads + head) * num_splits + split) * (dim + 2) * 4
                for place in range(dim + 2):
                    set_float(part + 4 * place, get_float(state + 4 * place))
            else:
                _leave(b, row, head, num_heads, dim, state)
        num_done += 1
    return finish(phase, num_jobs, num_done)


@compiled
def _leave(b: Any, row: Int, head: Int, num_heads: Int, dim: Int, state: Int) -> None:
    """A finished softmax to where the output product reads it."""
    stride = stride_of(num_heads * dim)
    factor = np.float32(1.0) / get_float(state + 4 * dim + 4)
    scaled(state, factor, b[ATTENDED] + (row * stride + head * dim) * 4, dim // 16, 0)


@compiled
def _gather_phase(phase: Int, b: Any, sizes: Any, num_rows: Int, num_splits: Int, scratch: Int) -> Int:
    """Merge what the blocks' jobs left, in the order of the keys, and quantise the row."""
    dim, num_heads, num_done = sizes[DIM], sizes[NUM_HEADS], 0
    num_groups = _groups(num_heads * dim)
    while True:
        row = take(phase)
        if row >= num_rows:
            break
        if num_splits > 1:
            for head in range(num_heads):
                state = _scratch_parts(scratch, dim)[4]
                _clear(state, np.int64(1), dim)
                for split in range(num_splits):
                    part = b[PARTS] + ((row * num_heads + head) * num_splits + split) * (dim + 2) * 4
                    if get_float(part + 4 * dim) != -np.inf:
                        merge_block(state, part, dim)
                _leave(b, row, head, num_heads, dim, state)
        _quantise(b, row, b[ATTENDED] + row * stride_of(num_heads * dim) * 4, np.int64(0), num_groups, num_groups)
        num_done += 1
    return finish(phase, num_rows, num_done)


@compiled
def _activate_phase(phase: Int, b: Any, sizes: Any, num_rows: Int) -> Int:
    """activation(gate) * up, quantised."""
    width, num_done = sizes[INTERMEDIATE], 0
    num_groups = _groups(width)
    num_parts = (num_groups + _ACTIVATION_GROUPS_A_JOB - 1) // _ACTIVATION_GROUPS_A_JOB
    while True:
        job = take(phase)
        if job >= num_rows * num_parts:
            break
        row, part = job // num_parts, job % num_parts
        first, stop = part * _ACTIVATION_GROUPS_A_JOB, min(num_groups, (part + 1) * _ACTIVATION_GROUPS_A_JOB)
        begin, sixteens = first * GROUP, (min(width, stop * GROUP) - first * GROUP) // 16
        gate = b[WIDE] + (row * stride_of(2 * width) + begin) * 4
        out = b[ACTIVE] + row * stride_of(width) * 4
        if sizes[GELU]:
            gelu(gate, gate + width * 4, out + begin * 4, sixteens)
        else:
            silu(gate, gate + width * 4, out + begin * 4, sixteens)
        _quantise(b, row, out, first, stop, num_groups)
        num_done += 1
    return finish(phase, num_rows * num_parts, num_done)


@compiled
def _embed_phase(phase: Int, b: Any, sizes: Any, tokens: Any, embedding: Any, factor: Any) -> Int:
    hidden, num_done = sizes[HIDDEN], 0
    num_groups = _groups(hidden)
    while True:
        row = take(phase)
        if row >= len(tokens):
            break
        token, bits, x = tokens[row], embedding[3], b[X] + row * stride_of(hidden) * 4
        tile = embedding[0] + token // 16 * tile_bytes(bits, num_groups)
        scales = embedding[1] + token // 16 * scale_bytes(bits, num_groups)
        if bits == 8:
            unpack_bytes(tile, token % 16, get_float(scales + token % 16 * 4) * factor, hidden // 16, x)
        else:
            for part in range(hidden // 16):  # the place of what is unpacked holds the group's scales until then
                out = x + part * 64
                unpack_halves(scales + part // 2 * 32, out)
                unpack_bytes(tile + part * 256, token % 16, get_float(out + token % 16 * 4) * factor, 1, out)
        num_done += 1
    return finish(phase, len(tokens), num_done)


@compiled
def _join_phase(phase: Int, b: Any, sizes: Any, layer: Any, num_rows: Int, epsilon: Any) -> Int:
    """Rows of a draft head: norm(embedded token) and norm(given state) side by side, quantised; x starts as the state,
    or (JOINED 2) as its norm."""
    hidden, num_done = sizes[HIDDEN], 0
    num_groups = _groups(2 * hidden)
    while True:
        row = take(phase)
        if row >= num_rows:
            break
        state, normed = b[STATES] + row * hidden * 4, b[NORMED] + row * stride_of(2 * hidden) * 4
        second = normed + hidden * 4
        normalise(b[EMBEDDED] + row * hidden * 4, layer[EMBEDDING_NORM], hidden // 16, epsilon, normed)
        normalise(state, layer[NORM_1], hidden // 16, epsilon, second)
        x = b[X] + row * stride_of(hidden) * 4
        scaled(second if sizes[JOINED] == 2 else state, 1.0, x, hidden // 16, 0)
        _quantise(b, row, normed, np.int64(0), num_groups, num_groups)
        num_done += 1
    return finish(phase, num_rows, num_done)


@compiled
def _head_phases(phase: Int, b: Any, sizes: Any, wanted: Any, norm: Int, head: Any, epsilon: Any) -> Int:
    """The last norm, of wanted rows only, and the head."""
    hidden, num_done = sizes[HIDDEN], 0
    num_groups = _groups(hidden)
    stride = stride_of(hidden)
    while True:
        place = take(phase)
        if place >= len(wanted):
            break
        normed = b[NORMED] + place * stride * 4
        normalise(b[X] + wanted[place] * stride * 4, norm, hidden // 16, epsilon, normed)
        _quantise(b, place, normed, np.int64(0), num_groups, num_groups)
        num_done += 1
    phase = finish(phase, len(wanted), num_done)
    vocab = sizes[VOCAB]
    return _product(phase, b, head, len(wanted), hidden, vocab, b[LOGITS], stride_of(vocab), np.int64(0))


@compiled
def run_pass(phases: Any, b: Any, sizes: Any, layers: Any, ends: Any, factors: Any, batch: Any, rows: Any,
             num_splits: Int) -> None:  # fmt: skip
    """One pass, or this thread's share of it.

    phases: fresh counters. ends: [embedding, head, (final norm, 0, 0, 0)], as matrices. factors: epsilon, attention
    scale, embedding scale. batch: tokens, positions, slots, wanted rows, groups of rows (first, end, start in the slot
    table, number of blocks). rows: prefixes, ancestor bits, slot table. With sizes[JOINED] it is a draft head's: one
    layer, whose rows start from given states.
    """
    tokens, positions, slots, wanted, groups = batch
    epsilon, scale = factors[0], factors[1]
    dim, num_heads, num_rows = sizes[DIM], sizes[NUM_HEADS], len(tokens)
    hidden, inner = sizes[HIDDEN], sizes[INTERMEDIATE]
    stride, width = stride_of(hidden), (num_heads + 2 * sizes[NUM_KEY_HEADS]) * dim
    phase = np.int64(phases.ctypes.data)
    scratch = b[SCRATCH] + take(phase) * sizes[SCRATCH_BYTES]  # the first counter gives each thread a number
    phase = finish(phase, np.int64(0), np.int64(0))
    none, one = np.int64(0), np.int64(1)  # a bare 0 would be a type of its own, and each function compiled again
    post, tap = none, none
    inputs = hidden
    if sizes[JOINED]:
        inputs = 2 * hidden
        phase = _join_phase(phase, b, sizes, layers[0], num_rows, epsilon)
    else:
        phase = _embed_phase(phase, b, sizes, tokens, ends[0], factors[2])
    for number in range(len(layers)):
        layer = layers[number]
        if not sizes[JOINED]:
            phase = _norm_phase(phase, b, sizes, num_rows, layer[NORM_1], post, tap, epsilon)
        phase = _product(phase, b, layer[QKV:], num_rows, inputs, width, b[WIDE], stride_of(width), none)
        phase = _rotate_phase(phase, b, sizes, layer, positions, slots, epsilon)
        phase = _attend_phase(phase, b, sizes, layer, rows, groups, num_splits, scale, scratch)
        phase = _gather_phase(phase, b, sizes, num_rows, num_splits, scratch)
        post = layer[POST_1]
        out = b[WIDE] if post else b[X]
        phase = _product(phase, b, layer[OUT:], num_rows, num_heads * dim, hidden, out, stride, none if post else one)
        phase = _norm_phase(phase, b, sizes, num_rows, layer[NORM_2], post, none, epsilon)
        phase = _product(phase, b, layer[GATE_UP:], num_rows, hidden, 2 * inner, b[WIDE], stride_of(2 * inner), none)
        phase = _activate_phase(phase, b, sizes, num_rows)
        post, tap = layer[POST_2], layer[TAP]
        out = b[WIDE] if post else b[X]
        phase = _product(phase, b, layer[DOWN:], num_rows, inner, hidden, out, stride, none if post else one)
    if post or tap:
        phase = _norm_phase(phase, b, sizes, num_rows, none, post, tap, epsilon)
    if len(wanted):
        _head_phases(phase, b, sizes, wanted, ends[2, 0], ends[1][0:], epsilon)
