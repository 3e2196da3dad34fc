// What happens to one row between products. Widths are counted in sixteens.
//
// It does not know layers. Plain-Python forms: reference.py.
#pragma once
#include "lanes.h"

// out = weight * row / rms(row)
static void normalise(const float *row, const float *weight, i64 width, float epsilon, float *out) {
    F squares = splat(0.0f);
    for (i64 i = 0; i < width; i++) {
        F x = load(row + 16 * i);
        squares = fma(x, x, squares);
    }
    float mean = total(squares) / (float)(width * 16) + epsilon;
    F factor = splat(1.0f / sqrtf(mean));
    for (i64 i = 0; i < width; i++) store(out + 16 * i, mul(mul(load(row + 16 * i), factor), load(weight + 16 * i)));
}

// out = the head's halves, rotated against each other; half: sixteens in one.
static void rotate(const float *row, const float *cosines, const float *sines, i64 half, float *out) {
    for (i64 i = 0; i < half; i++) {
        F x = load(row + 16 * i), y = load(row + 16 * (half + i)), c = load(cosines + 16 * i), s = load(sines + 16 * i);
        store(out + 16 * i, sub(mul(x, c), mul(y, s)));
        store(out + 16 * (half + i), add(mul(y, c), mul(x, s)));
    }
}

INLINE F sigmoid_of(F x) { return div(splat(1.0f), add(splat(1.0f), exponential(sub(splat(-0.0f), x)))); }

static void silu(const float *gate, const float *up, float *out, i64 width) {
    for (i64 i = 0; i < width; i++) {
        F g = load(gate + 16 * i);
        store(out + 16 * i, mul(mul(g, sigmoid_of(g)), load(up + 16 * i)));
    }
}

// The tanh form: x (1 + tanh z) / 2 is x sigmoid(2 z).
static void gelu(const float *gate, const float *up, float *out, i64 width) {
    const double c = 1.5957691216057308;  // 2 sqrt(2 / pi)
    for (i64 i = 0; i < width; i++) {
        F g = load(gate + 16 * i);
        F z = mul(g, fma(mul(g, g), splat((float)(0.044715 * c)), splat((float)c)));
        store(out + 16 * i, mul(mul(g, sigmoid_of(z)), load(up + 16 * i)));
    }
}

// out = row * factor, or out + that.
static void scaled(const float *row, float factor, float *out, i64 width, bool add_to) {
    F f = splat(factor), none = splat(0.0f);
    for (i64 i = 0; i < width; i++)
        store(out + 16 * i, add(add_to ? load(out + 16 * i) : none, mul(load(row + 16 * i), f)));
}

// One output's weights out of its int8 tile, as floats.
static void unpack_bytes(const uint8_t *tile, i64 lane, float scale, i64 width, float *out) {
    for (i64 i = 0; i < width * 16; i++) out[i] = (float)((int)tile[i / 4 * 64 + lane * 4 + i % 4] - 128) * scale;
}

// The same where each 32 inputs have a scale of their own, 16 float16 (one per output) a group.
static void unpack_groups(const uint8_t *tile, const uint16_t *scales, i64 lane, float factor, i64 width, float *out) {
    for (i64 part = 0; part < width; part++) {
        float all[16];
        store(all, from_half(scales + part / 2 * 16));
        unpack_bytes(tile + part * 256, lane, all[lane] * factor, 1, out + part * 16);
    }
}

struct Best { i64 id; float value; };  // of a row of logits; id < 0: nothing was looked at yet

// The first of the largest, or the first NaN if there is one, as numpy's argmax says it.
INLINE bool is_better(float value, const Best &than) {
    return than.id < 0 || value > than.value || (value != value && than.value == than.value);
}

// Numbers first..stop-1 of a row, after all that were looked at before.
static void look_for_best(const float *row, i64 first, i64 stop, Best *best) {
    F most = splat(row[first]);
    i64 i = first;
    for (; i + 16 <= stop; i += 16) most = largest(most, load(row + i));
    float top = largest_lane(most);
    for (; i < stop; i++) top = row[i] != row[i] || row[i] > top ? row[i] : top;
    if (!is_better(top, *best)) return;
    for (i = first; !(row[i] == top || (top != top && row[i] != row[i]));) i++;
    *best = {i, top};
}

// Which of two threads' is the row's: of equals the lower id, for each thread saw its ids in their order.
INLINE void keep_better(const Best &other, Best *best) {
    if (other.id < 0) return;
    bool same = other.value == best->value || (other.value != other.value && best->value != best->value);
    if (is_better(other.value, *best) || (same && other.id < best->id)) *best = other;
}
