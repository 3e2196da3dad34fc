// Quantised rows times packed weights, and rows made ready for that. Layouts: see models/products.py.
//
// It does not know layers. The one trick: a tile of 16 outputs is read once for up to 8 rows, its 4-bit numbers are
// unpacked once, and the lines of the tile after it are asked for meanwhile; a row's sums are the same beside any others.
#pragma once
#include "lanes.h"

constexpr i64 GROUP = 32, ROWS = 8, SUMS_LINE = 8 * ROWS;
constexpr i64 AHEAD = 3072;  // bytes from what is multiplied to what is asked for

// One group: 32 inputs of 16 outputs, for N rows. data: the rows' bytes, a line of ROWS words per 4 inputs.
template <int BITS, int N> INLINE void add_group(I *sums, const uint8_t *tile, const int8_t *data) {
#pragma GCC unroll 8
    for (int step = 0; step < GROUP / 4; step++) {
        I weights = BITS == 8 ? load_int(tile + 64 * step)
                    : step % 2 ? high_halves(load_int(tile + 64 * (step / 2)))
                               : low_halves(load_int(tile + 64 * (step / 2)));
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) {
            int32_t four;
            memcpy(&four, data + 4 * ROWS * step + 4 * m, 4);
            sums[m] = dot<BITS>(sums[m], weights, splat_int(four));
        }
    }
}

// out (or, with add, out +) = rows @ weights + bias, for one tile. row_scales, row_sums: of the first row.
template <int BITS, int N>
static void tile_product(const uint8_t *weights, const uint8_t *scales, const float *bias, const int8_t *data,
                         const float *row_scales, const uint8_t *row_sums, i64 num_groups, float *out, i64 stride,
                         bool add_to) {
    F totals[N];
    for (int m = 0; m < N; m++) totals[m] = splat(0.0f);
    for (i64 group = 0; group < num_groups; group++) {
        const float *own_sums = (const float *)(row_sums + group * SUMS_LINE) + ROWS;
        const int32_t *shifts = (const int32_t *)(row_sums + group * SUMS_LINE);
        const float *own_scales = row_scales + group * ROWS;
        const uint8_t *tile = weights + group * GROUP * 2 * BITS;
        if (N > 1)  // one row waits for nothing but memory, and the processor's own guesses serve it better
            for (i64 line = 0; line < GROUP * 2 * BITS; line += 64) __builtin_prefetch(tile + AHEAD + line, 0, 3);
        I sums[N];
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) sums[m] = BITS == 8 ? splat_int(shifts[m]) : zeros();
        add_group<BITS, N>(sums, tile, data + group * GROUP * ROWS);
        F factors = splat(0.0f), minimums = factors;
        if (BITS == 4) {
            const uint8_t *halves = scales + group * 64;
            if (N > 1) __builtin_prefetch(halves + AHEAD / 4, 0, 3);
            factors = from_half(halves), minimums = from_half(halves + 32);
        }
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) {
            F value = to_float(sums[m]);
            if (BITS == 4) value = fma(minimums, splat(own_sums[m]), mul(value, factors));
            totals[m] = fma(value, splat(own_scales[m]), totals[m]);
        }
    }
    for (int m = 0; m < N; m++) {
        F value = BITS == 8 ? fma(totals[m], load((const float *)scales), load(bias)) : add(totals[m], load(bias));
        float *place = out + m * stride;
        store(place, add_to ? add(load(place), value) : value);
    }
}

typedef void (*TileProduct)(const uint8_t *, const uint8_t *, const float *, const int8_t *, const float *,
                            const uint8_t *, i64, float *, i64, bool);
static const TileProduct tile_products[2][MOST_ROWS] = {
#if MOST_ROWS == 8
    {tile_product<4, 1>, tile_product<4, 2>, tile_product<4, 3>, tile_product<4, 4>, tile_product<4, 5>,
     tile_product<4, 6>, tile_product<4, 7>, tile_product<4, 8>},
    {tile_product<8, 1>, tile_product<8, 2>, tile_product<8, 3>, tile_product<8, 4>, tile_product<8, 5>,
     tile_product<8, 6>, tile_product<8, 7>, tile_product<8, 8>},
#else
    {tile_product<4, 1>, tile_product<4, 2>, tile_product<4, 3>, tile_product<4, 4>},
    {tile_product<8, 1>, tile_product<8, 2>, tile_product<8, 3>, tile_product<8, 4>},
#endif
};

struct Matrix { i64 weights, scales, bias, bits; };  // addresses
struct Blocks { i64 data, scales, sums; };           // of quantised rows

// One tile's 16 outputs for all rows; stride: floats from one row of `out` to the next.
static void multiply_tile(const Matrix &w, i64 tile, const Blocks &rows, i64 num_rows, i64 num_groups, float *out,
                          i64 stride, bool add_to) {
    const uint8_t *weights = (const uint8_t *)w.weights + tile * num_groups * GROUP * 2 * w.bits;
    const uint8_t *scales = (const uint8_t *)w.scales + tile * (w.bits == 8 ? 64 : 64 * num_groups);
    const float *bias = (const float *)w.bias + tile * 16;
    for (i64 done = 0; done < num_rows;) {
        i64 block = done / ROWS, place = done % ROWS;
        i64 left = (num_rows - block * ROWS < ROWS ? num_rows - block * ROWS : ROWS) - place;
        i64 parts = (left + MOST_ROWS - 1) / MOST_ROWS, count = (left + parts - 1) / parts;  // equal parts
        tile_products[w.bits == 8][count - 1](
            weights, scales, bias, (const int8_t *)rows.data + block * num_groups * GROUP * ROWS + place * 4,
            (const float *)rows.scales + block * num_groups * ROWS + place,
            (const uint8_t *)rows.sums + block * num_groups * SUMS_LINE + place * 4, num_groups,
            out + tile * 16 + done * stride, stride, add_to);
        done += count;
    }
}

// Groups first..stop-1 of a row of floats into row number `row` of the blocks. A NaN or an infinity makes the scale one.
static void quantise_row(const float *values, i64 row, i64 first, i64 stop, i64 num_groups, const Blocks &to) {
    i64 block = row / ROWS * num_groups, place = row % ROWS;
    for (i64 group = first; group < stop; group++) {
        i64 line = block + group;
        F low = load(values + group * GROUP), high = load(values + group * GROUP + 16);
        float size = largest_lane(largest(magnitude(low), magnitude(high)));
        bool usable = size > 0.0f && size < 3.0e38f;
        F inverse = splat(usable ? 127.0f / size : 0.0f);
        int8_t bytes[GROUP] = {};
        int32_t sum = 0;
        if (usable) sum = to_bytes(whole(mul(low, inverse)), bytes) + to_bytes(whole(mul(high, inverse)), bytes + 16);
        int8_t *data = (int8_t *)to.data + line * GROUP * ROWS + place * 4;
        for (int j = 0; j < GROUP / 4; j++) memcpy(data + 4 * ROWS * j, bytes + 4 * j, 4);
        ((float *)to.scales)[line * ROWS + place] = size * (float)(1.0 / 127);
        ((int32_t *)(to.sums + line * SUMS_LINE))[place] = -128 * sum;
        ((float *)(to.sums + line * SUMS_LINE))[ROWS + place] = (float)sum;
    }
}
