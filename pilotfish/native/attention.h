// Attention over paged keys, a row's result a function of that row's own keys: attention/compiled.py says how.
//
// It does not know models. Scores are one chain of multiply-adds over the head's width, value columns one chain over a
// block's keys, and blocks are merged in their order.
#pragma once
#include "lanes.h"

constexpr i64 BLOCK = 128;

// out[d][j] = number d of key j, for 16 keys (all of them valid addresses).
INLINE void transpose_sixteen(const float *const *keys, i64 width, float *out) {
    for (i64 part = 0; part < width; part++, out += 16 * BLOCK) {
#if defined(__AVX512F__)
        __m512 r[16], t[16];
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(keys[i] + 16 * part);
#pragma GCC unroll 8
        for (int i = 0; i < 16; i += 2)
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 4)
            for (int j = 0; j < 2; j++) {
                __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
                r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {  // r[4 q + i]: quarters of columns i, 4 + i, 8 + i, 12 + i of keys 4 q ..
            __m512 a = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xDD);
            __m512 c = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88), d = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xDD);
            _mm512_storeu_ps(out + i * BLOCK, _mm512_shuffle_f32x4(a, c, 0x88));
            _mm512_storeu_ps(out + (8 + i) * BLOCK, _mm512_shuffle_f32x4(a, c, 0xDD));
            _mm512_storeu_ps(out + (4 + i) * BLOCK, _mm512_shuffle_f32x4(b, d, 0x88));
            _mm512_storeu_ps(out + (12 + i) * BLOCK, _mm512_shuffle_f32x4(b, d, 0xDD));
        }
#else
        for (int d = 0; d < 16; d++)
            for (int j = 0; j < 16; j++) out[d * BLOCK + j] = keys[j][16 * part + d];
#endif
    }
}

INLINE void ask_for(const char *memory, i64 bytes) {
    for (i64 place = 0; place < bytes; place += 64) __builtin_prefetch(memory + place, 0, 2);
}

struct Head {  // one key head of one sequence
    const i64 *slots;
    const char *keys, *values;  // of slot 0
    i64 stride, dim;            // bytes between slots, floats
};

// Offsets of the trunk's keys first..stop-1 (of one block), and these keys transposed.
static void lift_keys(const Head &h, i64 first, i64 stop, i64 *offsets, float *lifted) {
    i64 count = stop - first, last = h.slots[stop - 1] * h.stride;
    for (i64 j = 0; j < count; j++) offsets[j] = h.slots[first + j] * h.stride;
    for (; count % 16; count++) offsets[count] = last;  // whole vectors: a valid place, whatever is there
    for (i64 j = 0; j < count; j += 16) {
        const float *keys[16];
        for (int i = 0; i < 16; i++) keys[i] = (const float *)(h.keys + offsets[j + i]);
        for (int i = 0; i < 16; i++) ask_for(h.values + offsets[j + i], h.dim * 4);  // read when the scores are there
        transpose_sixteen(keys, h.dim / 16, lifted + j);
    }
}

// The same for those of a row's own keys in the block that are tree nodes: the set bits.
static void lift_nodes(const Head &h, i64 prefix, uint64_t bits, i64 first, i64 stop, i64 *offsets, float *lifted) {
    i64 key = prefix;
    for (i64 node = 0; key < stop; node++) {
        if (!(bits >> node & 1)) continue;
        if (key >= first) {
            i64 place = h.slots[prefix + node] * h.stride;
            offsets[key - first] = place;
            for (i64 d = 0; d < h.dim; d++) lifted[d * BLOCK + key - first] = ((const float *)(h.keys + place))[d];
        }
        key++;
    }
}

template <int N, int COLUMNS>
INLINE void score_columns(const float *queries, const float *lifted, i64 dim, float scale, float *out) {
    F sums[N][COLUMNS];
    for (int i = 0; i < N; i++)
        for (int c = 0; c < COLUMNS; c++) sums[i][c] = splat(0.0f);
    for (i64 d = 0; d < dim; d++) {
        F keys[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) keys[c] = load(lifted + d * BLOCK + 16 * c);
        for (int i = 0; i < N; i++)
            for (int c = 0; c < COLUMNS; c++) sums[i][c] = fma(splat(queries[i * dim + d]), keys[c], sums[i][c]);
    }
    for (int i = 0; i < N; i++)
        for (int c = 0; c < COLUMNS; c++) store(out + i * BLOCK + 16 * c, mul(sums[i][c], splat(scale)));
}

// Keys that are wanted next: whoever weighs values asks memory for them, one a value.
struct Coming {
    const i64 *slots, *stop;
    const char *keys;
    i64 stride, bytes;

    void ask() {
        if (slots < stop) ask_for(keys + *slots++ * stride, bytes);
    }
};

template <int N, int COLUMNS>
INLINE void weigh_columns(const float *weights, const Head &h, const i64 *offsets, i64 num_keys, i64 column,
                          Coming &coming, float *out) {
    F sums[N][COLUMNS];
    for (int i = 0; i < N; i++)
        for (int c = 0; c < COLUMNS; c++) sums[i][c] = splat(0.0f);
    for (i64 j = 0; j < num_keys; j++) {
        const float *value = (const float *)(h.values + offsets[j]) + column;
        F parts[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) parts[c] = load(value + 16 * c);
        coming.ask();
        for (int i = 0; i < N; i++)
            for (int c = 0; c < COLUMNS; c++) sums[i][c] = fma(splat(weights[i * BLOCK + j]), parts[c], sums[i][c]);
    }
    for (int i = 0; i < N; i++)
        for (int c = 0; c < COLUMNS; c++) store(out + i * (h.dim + 2) + column + 16 * c, sums[i][c]);
}

// Partial softmaxes of N heads of one row over one block, dim + 2 floats each: the weighted sum of values, the largest
// score, the sum of weights. num_unseen: first keys of the block that the window hides.
template <int N>
static void attend_block(const float *queries, const float *lifted, const Head &h, const i64 *offsets, i64 num_keys,
                         i64 num_unseen, float scale, Coming &coming, float *scores, float *out) {
    i64 sixteens = (num_keys + 15) / 16, width = h.dim / 16, i;
    for (i = 0; i + 4 <= sixteens; i += 4)
        score_columns<N, 4>(queries, lifted + 16 * i, h.dim, scale, scores + 16 * i);
    for (; i < sixteens; i++) score_columns<N, 1>(queries, lifted + 16 * i, h.dim, scale, scores + 16 * i);
    for (int n = 0; n < N; n++) {
        float *row = scores + n * BLOCK, *place = out + n * (h.dim + 2) + h.dim;
        for (i64 key = 0; key < num_unseen; key++) row[key] = -INFINITY;
        for (i64 key = num_keys; key < sixteens * 16; key++) row[key] = -INFINITY;
        F best = splat(-INFINITY), sum = splat(0.0f);
        for (i = 0; i < sixteens; i++) best = largest(best, load(row + 16 * i));
        place[0] = largest_lane(best);
        for (i = 0; i < sixteens; i++) {
            F weight = exponential(sub(load(row + 16 * i), splat(place[0])));
            store(row + 16 * i, weight);
            sum = add(sum, weight);
        }
        place[1] = total(sum);
    }
    i64 seen = num_keys - num_unseen;
    for (i = 0; i + 4 <= width; i += 4)
        weigh_columns<N, 4>(scores + num_unseen, h, offsets + num_unseen, seen, 16 * i, coming, out);
    for (; i < width; i++)
        weigh_columns<N, 1>(scores + num_unseen, h, offsets + num_unseen, seen, 16 * i, coming, out);
}

static void clear_states(float *state, i64 num, i64 dim) {
    for (i64 i = 0; i < num; i++, state += dim + 2) {
        memset(state, 0, (dim + 2) * sizeof(float));
        state[dim] = -INFINITY;
    }
}

// Take one more block's partial softmax into the row's running one.
static void merge_block(float *into, const float *part, i64 dim) {
    float a = into[dim], b = part[dim];
    float best = a != a || b != b ? a + b : a > b ? a : b;
    float keep = expf(a - best), share = expf(b - best);
    for (i64 i = 0; i < dim; i += 16)
        store(into + i, fma(load(part + i), splat(share), mul(load(into + i), splat(keep))));
    into[dim] = best;
    into[dim + 1] = into[dim + 1] * keep + part[dim + 1] * share;
}
