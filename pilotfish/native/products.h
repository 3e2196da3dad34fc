// Quantised rows times packed weights, and rows made ready for that. Layouts: see models/products.py.
//
// It does not know layers. The one trick: a tile of 16 outputs is read once for up to 8 rows, its 4-bit numbers are
// unpacked once, and what will be read next, in this tile or in the one after it, is asked for meanwhile; a row's sums
// are the same beside any others.
#pragma once
#include "team.h"

constexpr i64 GROUP = 32, ROWS = 8, SUMS_LINE = 8 * ROWS;
constexpr i64 AHEAD = 3072, JOB_BYTES = 131072;  // bytes from what is multiplied to what is asked for, and taken at once
constexpr int GROUPED = 9;                      // weights as int8's, with a scale per output and group

constexpr int bits_of(i64 kind) { return kind == 4 ? 4 : 8; }
constexpr i64 scale_bytes(i64 kind) { return kind == 4 ? 64 : kind == GROUPED ? 32 : 0; }  // of a group; 0: 64 a tile

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

struct Tile { const uint8_t *weights, *scales; };

// out (or, with add, out +) = rows @ weights + bias, for one tile. row_scales, row_sums: of the first row. next: what is
// read after this tile.
template <int KIND_OF_WEIGHTS, int N>
static void tile_product(Tile own, Tile next, const float *bias, const int8_t *data, const float *row_scales,
                         const uint8_t *row_sums, i64 num_groups, float *out, i64 stride, bool add_to) {
    constexpr int BITS = bits_of(KIND_OF_WEIGHTS);
    constexpr i64 BYTES = GROUP * 2 * BITS, SCALE_BYTES = scale_bytes(KIND_OF_WEIGHTS), DISTANCE = AHEAD / BYTES;
    F totals[N];
    for (int m = 0; m < N; m++) totals[m] = splat(0.0f);
    for (i64 group = 0; group < num_groups; group++) {
        const float *own_sums = (const float *)(row_sums + group * SUMS_LINE) + ROWS;
        const int32_t *shifts = (const int32_t *)(row_sums + group * SUMS_LINE);
        const float *own_scales = row_scales + group * ROWS;
        const uint8_t *tile = own.weights + group * BYTES, *halves = own.scales + group * SCALE_BYTES;
        if (N > 1) {  // one row waits for nothing but memory, and the processor's own guesses serve it better
            i64 beyond = group + DISTANCE - num_groups;
            const Tile &from = beyond < 0 ? own : next;
            i64 place = beyond < 0 ? group + DISTANCE : beyond;
            for (i64 line = 0; line < BYTES; line += 64) __builtin_prefetch(from.weights + place * BYTES + line, 0, 3);
            if (SCALE_BYTES) __builtin_prefetch(from.scales + place * SCALE_BYTES, 0, 3);
        }
        I sums[N];
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) sums[m] = BITS == 8 ? splat_int(shifts[m]) : zeros();
        add_group<BITS, N>(sums, tile, data + group * GROUP * ROWS);
        F factors = splat(0.0f), minimums = factors;
        if (SCALE_BYTES) factors = from_half(halves);
        if (BITS == 4) minimums = from_half(halves + 32);
#pragma GCC unroll 8
        for (int m = 0; m < N; m++) {
            F value = to_float(sums[m]);
            if (SCALE_BYTES) value = mul(value, factors);
            if (BITS == 4) value = fma(minimums, splat(own_sums[m]), value);
            totals[m] = fma(value, splat(own_scales[m]), totals[m]);
        }
    }
    for (int m = 0; m < N; m++) {
        F value = SCALE_BYTES ? add(totals[m], load(bias)) : fma(totals[m], load((const float *)own.scales), load(bias));
        float *place = out + m * stride;
        store(place, add_to ? add(load(place), value) : value);
    }
}

typedef void (*TileProduct)(Tile, Tile, const float *, const int8_t *, const float *, const uint8_t *, i64, float *, i64,
                            bool);
#define UP_TO_4(k) tile_product<k, 1>, tile_product<k, 2>, tile_product<k, 3>, tile_product<k, 4>
#if MOST_ROWS == 8
#define ALL(k) {UP_TO_4(k), tile_product<k, 5>, tile_product<k, 6>, tile_product<k, 7>, tile_product<k, 8>}
#else
#define ALL(k) {UP_TO_4(k)}
#endif
static const TileProduct products_4[] = ALL(4), products_8[] = ALL(8), products_grouped[] = ALL(GROUPED);

struct Matrix { i64 weights, scales, bias, kind; };  // addresses; 4, 8 or GROUPED
struct Blocks { i64 data, scales, sums; };           // of quantised rows

INLINE i64 tile_bytes(i64 kind, i64 num_groups) { return num_groups * GROUP * 2 * bits_of(kind); }

INLINE Tile tile_of(const Matrix &w, i64 tile, i64 num_groups) {
    i64 scales = scale_bytes(w.kind) ? scale_bytes(w.kind) * num_groups : 64;
    return {(const uint8_t *)w.weights + tile * tile_bytes(w.kind, num_groups), (const uint8_t *)w.scales + tile * scales};
}

// One tile's 16 outputs for all rows; stride: floats from one row of `out` to the next; next: the tile after this one.
static void multiply_tile(const Matrix &w, i64 tile, i64 next, const Blocks &rows, i64 num_rows, i64 num_groups,
                          float *out, i64 stride, bool add_to) {
    const TileProduct *products = w.kind == 4 ? products_4 : w.kind == 8 ? products_8 : products_grouped;
    const Tile own = tile_of(w, tile, num_groups), after = tile_of(w, next, num_groups);
    const float *bias = (const float *)w.bias + tile * 16;
    for (i64 done = 0; done < num_rows;) {
        i64 block = done / ROWS, place = done % ROWS;
        i64 left = (num_rows - block * ROWS < ROWS ? num_rows - block * ROWS : ROWS) - place;
        i64 parts = (left + MOST_ROWS - 1) / MOST_ROWS, count = (left + parts - 1) / parts;  // equal parts
        products[count - 1](
            own, done + count < num_rows ? own : after, bias,
            (const int8_t *)rows.data + block * num_groups * GROUP * ROWS + place * 4,
            (const float *)rows.scales + block * num_groups * ROWS + place,
            (const uint8_t *)rows.sums + block * num_groups * SUMS_LINE + place * 4, num_groups,
            out + tile * 16 + done * stride, stride, add_to);
        done += count;
    }
}

// Tiles that are taken as one job: memory is fastest in long stretches, and nobody should wait long for the last one.
INLINE i64 tiles_a_job(i64 kind, i64 num_groups, i64 num_tiles) {
    i64 tiles = JOB_BYTES / tile_bytes(kind, num_groups);
    tiles = tiles < 1 ? 1 : tiles > 32 ? 32 : tiles;
    return num_tiles >= 8 * tiles ? tiles : num_tiles < 16 ? 1 : num_tiles / 8;
}

INLINE i64 num_product_jobs(i64 kind, i64 num_groups, i64 num_tiles) {
    i64 tiles = tiles_a_job(kind, num_groups, num_tiles);
    return (num_tiles + tiles - 1) / tiles;
}

// Take jobs of a phase until there are none; returns how many this thread did. Each takes the number of its next job
// before it does one: so it knows what to ask memory for. look(first, stop): is told which outputs were just written.
template <class Look>
static i64 multiply(i64 phase, const Matrix &w, const Blocks &rows, i64 num_rows, i64 num_groups, i64 num_tiles,
                    float *out, i64 stride, bool add_to, Look look) {
    i64 tiles = tiles_a_job(w.kind, num_groups, num_tiles);
    i64 num_jobs = num_product_jobs(w.kind, num_groups, num_tiles), num_done = 0;
    for (i64 job = take(phase), next; job < num_jobs; job = next, num_done++) {
        next = take(phase);
        i64 stop = (job + 1) * tiles < num_tiles ? (job + 1) * tiles : num_tiles;
        for (i64 tile = job * tiles; tile < stop; tile++)
            multiply_tile(w, tile, tile + 1 < stop || next >= num_jobs ? tile + 1 : next * tiles, rows, num_rows,
                          num_groups, out, stride, add_to);
        look(job * tiles * 16, stop * 16);
    }
    return num_done;
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
