// The whole pass of a quantised decoder as one call, run by all threads of a team: models/loops.py in C++.
//
// It does not know files, requests or Python. The one trick: the same tables, buffers and phases as loops.py, and the
// same roundings, so both give the same bits, and the tables below are the only thing they must agree on.
#include "attention.h"
#include "crew.h"
#include "noise.h"
#include "products.h"
#include "rows.h"

// -- tables, as loops.py has them ----------------------------------------------------------------------------------

enum Column { QKV = 0, OUT = 4, GATE_UP = 8, DOWN = 12, NORM_1 = 16, NORM_2, POST_1, POST_2, Q_NORM, K_NORM, KEYS,
              VALUES, WINDOW, ROPE, TAP, EMBEDDING_NORM, NUM_COLUMNS };
enum Size { HIDDEN, NUM_HEADS, NUM_KEY_HEADS, DIM, INTERMEDIATE, VOCAB, GELU, SCRATCH_BYTES, JOINED, NUM_SIZES };
enum Buffer { X, NORMED, BYTES, SCALES, SUMS, WIDE, QUERIES, ATTENDED, ACTIVE, PARTS, LOGITS, SCRATCH, COSINES, SINES,
              STATES = COSINES + 4, EMBEDDED, BEST, NUM_BUFFERS };
constexpr i64 NUM_ENDS = 9, NUM_FACTORS = 3;  // of `ends` and `factors`
constexpr i64 ACTIVATION_GROUPS_A_JOB = 16, MOST_AHEAD = 1 << 18;

struct Table {  // int64 each, as library.py fills it
    i64 phases;
    const i64 *b, *sizes, *layers;
    i64 num_layers;
    const i64 *ends;
    const float *factors;
    const i64 *tokens, *positions, *slots, *wanted;
    i64 num_wanted;
    const i64 *groups;
    i64 num_groups;
    const i64 *prefixes, *bits, *slot_table;
    i64 num_splits, num_rows, num_threads;
};

INLINE i64 groups_of(i64 width) { return (width + GROUP - 1) / GROUP; }
INLINE i64 stride_of(i64 width) { return groups_of(width) * GROUP + 16; }

struct Pass : Table {
    i64 phase, number;  // of this thread
    char *scratch;
    Ahead ahead = {nullptr, nullptr};
    i64 hidden, dim, heads, key_heads, inner;
    float epsilon;
    Blocks blocks;

    explicit Pass(const Table &given) : Table(given), phase(given.phases) {
        hidden = sizes[HIDDEN], dim = sizes[DIM], heads = sizes[NUM_HEADS], key_heads = sizes[NUM_KEY_HEADS];
        inner = sizes[INTERMEDIATE], epsilon = factors[0];
        blocks = {b[BYTES], b[SCALES], b[SUMS]};
        number = take(phase);  // the first counter numbers the threads
        scratch = (char *)(b[SCRATCH] + number * sizes[SCRATCH_BYTES]);
        phase = finish(phase, 0, 0, &ahead);
    }

    float *row_of(Buffer buffer, i64 row, i64 width) const { return (float *)b[buffer] + row * stride_of(width); }

    // Run a phase of `num_jobs` jobs.
    template <class Job> void each(i64 num_jobs, Job job) {
        i64 num_done = 0;
        for (i64 number; (number = take(phase)) < num_jobs; num_done++) job(number);
        phase = finish(phase, num_jobs, num_done, &ahead);
    }

    // What to ask memory for while waiting: the beginning of this matrix.
    void expect(const i64 *matrix, i64 inputs, i64 outputs) {
        i64 bytes = tile_bytes(matrix[3], groups_of(inputs)) * ((outputs + 15) / 16);
        ahead.next = (const char *)matrix[0];
        ahead.stop = ahead.next + (bytes < MOST_AHEAD ? bytes : MOST_AHEAD);
    }

    template <class Look>
    void product(const i64 *matrix, i64 rows, i64 inputs, i64 outputs, float *out, i64 stride, bool add_to, Look look) {
        const Matrix w = {matrix[0], matrix[1], matrix[2], matrix[3]};
        i64 num_groups = groups_of(inputs), num_tiles = (outputs + 15) / 16;
        ahead.stop = ahead.next;
        i64 num_done = multiply(phase, w, blocks, rows, num_groups, num_tiles, out, stride, add_to, look);
        phase = finish(phase, num_product_jobs(w.kind, num_groups, num_tiles), num_done, &ahead);
    }

    void product(const i64 *matrix, i64 rows, i64 inputs, i64 outputs, float *out, i64 stride, bool add_to) {
        product(matrix, rows, inputs, outputs, out, stride, add_to, [](i64, i64) {});
    }

    void embed() {
        const i64 *embedding = ends;
        each(num_rows, [&](i64 row) {
            i64 token = tokens[row];
            const Matrix w = {embedding[0], embedding[1], 0, embedding[3]};
            const Tile tile = tile_of(w, token / 16, groups_of(hidden));
            float *x = row_of(X, row, hidden);
            if (w.kind == 8)
                unpack_bytes(tile.weights, token % 16, ((const float *)tile.scales)[token % 16] * factors[2], hidden / 16, x);
            else
                unpack_groups(tile.weights, (const uint16_t *)tile.scales, token % 16, factors[2], hidden / 16, x);
        });
    }

    // Rows of a draft head: norm(embedded token) and norm(given state) side by side; x starts as the state or its norm.
    void join() {
        each(num_rows, [&](i64 row) {
            const float *state = (const float *)b[STATES] + row * hidden;
            float *normed = row_of(NORMED, row, 2 * hidden), *second = normed + hidden;
            normalise((const float *)b[EMBEDDED] + row * hidden, (const float *)layers[EMBEDDING_NORM], hidden / 16,
                      epsilon, normed);
            normalise(state, (const float *)layers[NORM_1], hidden / 16, epsilon, second);
            scaled(sizes[JOINED] == 2 ? second : state, 1.0f, row_of(X, row, hidden), hidden / 16, false);
            quantise_row(normed, row, 0, groups_of(2 * hidden), groups_of(2 * hidden), blocks);
        });
    }

    // x to quantised norm(x). post: weight of the norm of what is still to be added to x, 0 if nothing is. tap: where x
    // is copied to, 0 if nowhere.
    void norm(i64 weight, i64 post, i64 tap) {
        each(num_rows, [&](i64 row) {
            float *x = row_of(X, row, hidden), *normed = row_of(NORMED, row, hidden);
            if (post) {
                normalise(row_of(WIDE, row, hidden), (const float *)post, hidden / 16, epsilon, normed);
                scaled(normed, 1.0f, x, hidden / 16, true);
            }
            if (tap) scaled(x, 1.0f, (float *)tap + row * hidden, hidden / 16, false);
            if (weight) {
                normalise(x, (const float *)weight, hidden / 16, epsilon, normed);
                quantise_row(normed, row, 0, groups_of(hidden), groups_of(hidden), blocks);
            }
        });
    }

    // Queries rotated into their buffer; keys rotated, and values as they are, into the cache's slots.
    void rotate_all(const i64 *layer) {
        i64 width = (heads + 2 * key_heads) * dim, half = dim / 32, table = layer[ROPE] * 2;
        each(num_rows, [&](i64 row) {
            const float *cosines = (const float *)b[COSINES + table] + positions[row] * (dim / 2);
            const float *sines = (const float *)b[SINES + table] + positions[row] * (dim / 2);
            float *start = row_of(WIDE, row, width);
            for (i64 head = 0; head < heads + key_heads; head++) {
                float *source = start + head * dim, *out;
                i64 weight = head < heads ? layer[Q_NORM] : layer[K_NORM];
                if (weight) normalise(source, (const float *)weight, dim / 16, epsilon, source);
                if (head < heads)
                    out = (float *)b[QUERIES] + (row * heads + head) * dim;
                else
                    out = (float *)layer[KEYS] + (slots[row] * key_heads + head - heads) * dim;
                rotate(source, cosines, sines, half, out);
            }
            scaled(start + (heads + key_heads) * dim, 1.0f, (float *)layer[VALUES] + slots[row] * key_heads * dim,
                   key_heads * dim / 16, false);
        });
    }

    struct Parts { i64 *offsets; float *scores, *parts, *lifted, *states; };

    Parts scratch_parts() const {
        char *scores = scratch + BLOCK * 8, *parts = scores + 4 * BLOCK * 4;
        char *lifted = parts + (4 * (dim + 2) * 4 + 63) / 64 * 64;
        return {(i64 *)scratch, (float *)scores, (float *)parts, (float *)lifted, (float *)lifted + dim * BLOCK};
    }

    // The trunk's keys in one block of one group's sequence.
    Coming keys_of(const i64 *layer, const i64 *group, i64 key_head, i64 block) const {
        i64 begin = block * BLOCK, trunk = prefixes[group[0]], end = begin + BLOCK < trunk ? begin + BLOCK : trunk;
        const i64 *slots = slot_table + group[2];
        return {slots + begin, slots + end, (const char *)((const float *)layer[KEYS] + key_head * dim),
                key_heads * dim * 4, dim * 4};
    }

    // Blocks first..stop-1 of one key head for the rows of one group, merged into this thread's states. after: what is
    // read next.
    void attend_rows(const i64 *layer, const i64 *group, i64 key_head, i64 first, i64 stop, const Coming &after) {
        const Parts mine = scratch_parts();
        const Head head = {slot_table + group[2], (const char *)((const float *)layer[KEYS] + key_head * dim),
                           (const char *)((const float *)layer[VALUES] + key_head * dim), key_heads * dim * 4, dim};
        i64 repeats = heads / key_heads, window = layer[WINDOW], longest = 0;
        for (i64 row = group[0]; row < group[1]; row++) longest = prefixes[row] > longest ? prefixes[row] : longest;
        for (i64 block = first; block < stop; block++) {
            i64 begin = block * BLOCK;
            Coming coming = block + 1 < stop ? keys_of(layer, group, key_head, block + 1) : after;
            if (begin < longest)
                lift_keys(head, begin, longest < begin + BLOCK ? longest : begin + BLOCK, mine.offsets, mine.lifted);
            for (i64 row = group[0]; row < group[1]; row++) {
                i64 num_keys = prefixes[row] + __builtin_popcountll((uint64_t)bits[row]);
                i64 end = num_keys < begin + BLOCK ? num_keys : begin + BLOCK;
                i64 unseen = window && num_keys - window > begin ? num_keys - window - begin : 0;
                if (end - begin <= unseen) continue;
                if (end > prefixes[row])
                    lift_nodes(head, prefixes[row], (uint64_t)bits[row], begin, end, mine.offsets, mine.lifted);
                for (i64 i = 0; i < repeats; i += 4) {
                    i64 num = repeats - i < 4 ? repeats - i : 4;
                    const float *query = (const float *)b[QUERIES] + (row * heads + key_head * repeats + i) * dim;
                    auto attend = num == 1 ? attend_block<1> : num == 2 ? attend_block<2>
                                  : num == 3 ? attend_block<3> : attend_block<4>;
                    attend(query, mine.lifted, head, mine.offsets, end - begin, unseen, factors[1], coming,
                           mine.scores, mine.parts);
                    float *state = mine.states + ((row - group[0]) * repeats + i) * (dim + 2);
                    for (i64 j = 0; j < num; j++) merge_block(state + j * (dim + 2), mine.parts + j * (dim + 2), dim);
                }
            }
        }
    }

    float *part_of(i64 row, i64 head, i64 split) const {
        return (float *)b[PARTS] + ((row * heads + head) * num_splits + split) * (dim + 2);
    }

    // A finished softmax to where the output product reads it.
    void leave(i64 row, i64 head, const float *state) {
        scaled(state, 1.0f / state[dim + 1], row_of(ATTENDED, row, heads * dim) + head * dim, dim / 16, false);
    }

    // Every group and key head; where there are few of them, every block of keys too.
    void attend(const i64 *layer) {
        i64 repeats = heads / key_heads, num_jobs = num_groups * key_heads * num_splits, num_done = 0;
        struct Place { const i64 *group; i64 split, key_head; };
        auto place_of = [&](i64 job) {
            i64 rest = job % (key_heads * num_splits);
            return Place{groups + job / (key_heads * num_splits) * 4, rest / key_heads, rest % key_heads};
        };
        for (i64 job = take(phase), next; job < num_jobs; job = next, num_done++) {  // taken ahead, as in products.h
            next = take(phase);
            auto [group, split, key_head] = place_of(job);
            Coming after = {};
            if (next < num_jobs) {
                auto [its_group, its_split, its_head] = place_of(next);
                after = keys_of(layer, its_group, its_head, its_split);
            }
            i64 num = (group[1] - group[0]) * repeats;
            float *states = scratch_parts().states;
            clear_states(states, num, dim);
            attend_rows(layer, group, key_head, split, num_splits > 1 ? split + 1 : group[3], after);
            for (i64 i = 0; i < num; i++) {
                i64 row = group[0] + i / repeats, head = key_head * repeats + i % repeats;
                if (num_splits > 1)
                    memcpy(part_of(row, head, split), states + i * (dim + 2), (dim + 2) * sizeof(float));
                else
                    leave(row, head, states + i * (dim + 2));
            }
        }
        phase = finish(phase, num_jobs, num_done, &ahead);
    }

    // Merge what the blocks' jobs left, in the order of the keys, and quantise the row.
    void gather() {
        i64 width = heads * dim;
        each(num_rows, [&](i64 row) {
            for (i64 head = 0; num_splits > 1 && head < heads; head++) {
                float *state = scratch_parts().states;
                clear_states(state, 1, dim);
                for (i64 split = 0; split < num_splits; split++) {
                    const float *part = part_of(row, head, split);
                    if (part[dim] != -INFINITY) merge_block(state, part, dim);
                }
                leave(row, head, state);
            }
            quantise_row(row_of(ATTENDED, row, width), row, 0, groups_of(width), groups_of(width), blocks);
        });
    }

    // activation(gate) * up, quantised.
    void activate() {
        i64 total = groups_of(inner), parts = (total + ACTIVATION_GROUPS_A_JOB - 1) / ACTIVATION_GROUPS_A_JOB;
        each(num_rows * parts, [&](i64 job) {
            i64 row = job / parts, first = job % parts * ACTIVATION_GROUPS_A_JOB;
            i64 stop = first + ACTIVATION_GROUPS_A_JOB < total ? first + ACTIVATION_GROUPS_A_JOB : total;
            i64 begin = first * GROUP, width = (inner < stop * GROUP ? inner : stop * GROUP) - begin;
            const float *gate = row_of(WIDE, row, 2 * inner) + begin;
            float *out = row_of(ACTIVE, row, inner);
            (sizes[GELU] ? gelu : silu)(gate, gate + inner, out + begin, width / 16);
            quantise_row(out, row, first, stop, total, blocks);
        });
    }

    void run_layer(const i64 *layer, i64 post, i64 tap) {
        i64 width = (heads + 2 * key_heads) * dim, stride = stride_of(hidden), inputs = sizes[JOINED] ? 2 * hidden : hidden;
        float *wide = (float *)b[WIDE], *x = (float *)b[X];
        expect(layer + QKV, inputs, width);
        if (!sizes[JOINED]) norm(layer[NORM_1], post, tap);
        product(layer + QKV, num_rows, inputs, width, wide, stride_of(width), false);
        expect(layer + OUT, heads * dim, hidden);
        rotate_all(layer);
        attend(layer);
        gather();
        post = layer[POST_1];
        product(layer + OUT, num_rows, heads * dim, hidden, post ? wide : x, stride, !post);
        expect(layer + GATE_UP, hidden, 2 * inner);
        norm(layer[NORM_2], post, 0);
        product(layer + GATE_UP, num_rows, hidden, 2 * inner, wide, stride_of(2 * inner), false);
        expect(layer + DOWN, inner, hidden);
        activate();
        post = layer[POST_2];
        product(layer + DOWN, num_rows, inner, hidden, post ? wide : x, stride, !post);
    }

    // The last norm, of wanted rows only, and the head.
    void run_head() {
        const i64 *head = ends + 4;
        expect(head, hidden, sizes[VOCAB]);
        each(num_wanted, [&](i64 place) {
            float *normed = row_of(NORMED, place, hidden);
            normalise(row_of(X, wanted[place], hidden), (const float *)ends[8], hidden / 16, epsilon, normed);
            quantise_row(normed, place, 0, groups_of(hidden), groups_of(hidden), blocks);
        });
        i64 vocab = sizes[VOCAB], stride = stride_of(vocab);
        float *logits = (float *)b[LOGITS];
        if (!b[BEST]) return product(head, num_wanted, hidden, vocab, logits, stride, false);
        Best *best = (Best *)b[BEST], *mine = best + number * num_wanted;
        product(head, num_wanted, hidden, vocab, logits, stride, false, [&](i64 first, i64 stop) {
            for (i64 row = 0; row < num_wanted; row++)
                look_for_best(logits + row * stride, first, stop < vocab ? stop : vocab, mine + row);
        });
        each(num_wanted, [&](i64 row) {
            for (i64 other = 1; other < num_threads; other++) keep_better(best[other * num_wanted + row], best + row);
        });
    }

    void run() {
        i64 post = 0, tap = 0;
        if (sizes[JOINED])
            join();
        else
            embed();
        for (i64 number = 0; number < num_layers; number++) {
            const i64 *layer = layers + number * NUM_COLUMNS;
            run_layer(layer, post, tap);
            post = layer[POST_2], tap = layer[TAP];
        }
        if (post || tap) norm(0, post, tap);
        if (num_wanted) run_head();
    }
};

static i64 sum_of_bytes(const char *memory, i64 size) {
    I sums[4] = {zeros(), zeros(), zeros(), zeros()};
    for (i64 place = 0; place + 256 <= size; place += 256)
        for (int i = 0; i < 4; i++)
            sums[i] = dot<4>(sums[i], load_int(memory + place + 64 * i), splat_int(0x01010101));
    int32_t words[64];
    memcpy(words, sums, sizeof words);
    i64 result = 0;
    for (int32_t word : words) result += word;
    return result;
}

// -- what Python calls ---------------------------------------------------------------------------------------------

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *pf_kind() { return KIND; }
// The table and the small arrays it points to, copied: a thread that comes late reads them when Python's are gone.
EXPORT void pf_run_pass(const Table *given, i64 num_threads, i64 num_phases) {
    Body body = [](i64 phase, const i64 *words) {
        Table table = *(const Table *)words;
        table.phases = phase;
        Pass(table).run();
    };
    crew().run(num_threads, num_phases, body, [&](std::vector<i64> &words) {
        constexpr i64 own = sizeof(Table) / 8, num_factors = (NUM_FACTORS + 1) / 2;
        i64 num_columns = given->num_layers * NUM_COLUMNS;
        words.resize(own + NUM_BUFFERS + NUM_SIZES + num_columns + NUM_ENDS + num_factors);
        Table *table = (Table *)words.data();
        *table = *given;
        table->num_threads = num_threads;
        i64 *to = words.data() + own;
        auto keep = [&](const void *from, i64 num_words, i64 num_bytes) {
            memcpy(to, from, num_bytes);
            return (to += num_words) - num_words;
        };
        table->b = keep(given->b, NUM_BUFFERS, NUM_BUFFERS * 8);
        table->sizes = keep(given->sizes, NUM_SIZES, NUM_SIZES * 8);
        table->layers = keep(given->layers, num_columns, num_columns * 8);
        table->ends = keep(given->ends, NUM_ENDS, NUM_ENDS * 8);
        table->factors = (const float *)keep(given->factors, num_factors, NUM_FACTORS * 4);
    });
}

// The parts, for tests and measurements.
EXPORT void pf_attend(const Table *table) {
    Pass pass(*table);
    pass.attend(pass.layers);
    pass.gather();
}

struct Chain { i64 rows, num_rows, num_groups, num_tiles, out, stride, add_to, num_matrices; Blocks blocks; };

static i64 multiply_chain(i64 phase, const Chain &chain, const i64 *matrices) {
    Ahead ahead = {nullptr, nullptr};
    for (i64 number = 0; number < chain.num_matrices; number++, matrices += 4) {
        const Matrix w = {matrices[0], matrices[1], matrices[2], matrices[3]};
        i64 num_done = multiply(phase, w, chain.blocks, chain.num_rows, chain.num_groups, chain.num_tiles,
                                (float *)chain.out, chain.stride, chain.add_to != 0, [](i64, i64) {});
        phase = finish(phase, num_product_jobs(w.kind, chain.num_groups, chain.num_tiles), num_done, &ahead);
    }
    return phase;
}

static void run_chain(i64 num_threads, i64 num_phases, const Chain &chain, const i64 *matrices, Body body) {
    crew().run(num_threads, num_phases, body, [&](std::vector<i64> &words) {
        words.resize(sizeof chain / 8 + 4 * chain.num_matrices);
        memcpy(words.data(), &chain, sizeof chain);
        memcpy(words.data() + sizeof chain / 8, matrices, 32 * chain.num_matrices);
    });
}

// Quantised rows times one matrix after the other, as a pass does it; out is that of the last one.
EXPORT void pf_products(i64 num_threads, const i64 *matrices, i64 num_matrices, const i64 *blocks, i64 num_rows,
                        i64 num_groups, i64 num_tiles, float *out, i64 stride, i64 add_to) {
    const Chain chain = {0, num_rows, num_groups, num_tiles, (i64)out, stride, add_to, num_matrices,
                         {blocks[0], blocks[1], blocks[2]}};
    run_chain(num_threads, num_matrices, chain, matrices, [](i64 phase, const i64 *words) {
        multiply_chain(phase, *(const Chain *)words, words + sizeof(Chain) / 8);
    });
}
// A layer that stands alone: rows of floats, quantised and multiplied.
EXPORT void pf_linear(i64 num_threads, const float *rows, i64 num_rows, i64 num_groups, const i64 *blocks,
                      const i64 *matrix, i64 num_tiles, float *out) {
    const Chain chain = {(i64)rows, num_rows, num_groups, num_tiles, (i64)out, num_tiles * 16, 0, 1,
                         {blocks[0], blocks[1], blocks[2]}};
    run_chain(num_threads, 2, chain, matrix, [](i64 phase, const i64 *words) {
        const Chain &chain = *(const Chain *)words;
        Ahead ahead = {nullptr, nullptr};
        i64 num_done = 0;
        for (i64 row; (row = take(phase)) < chain.num_rows; num_done++)
            quantise_row((const float *)chain.rows + row * chain.num_groups * GROUP, row, 0, chain.num_groups,
                         chain.num_groups, chain.blocks);
        phase = finish(phase, chain.num_rows, num_done, &ahead);
        multiply_chain(phase, chain, words + sizeof chain / 8);
    });
}
EXPORT void pf_quantise_row(const float *values, i64 row, i64 num_groups, const i64 *blocks) {
    quantise_row(values, row, 0, num_groups, num_groups, {blocks[0], blocks[1], blocks[2]});
}
EXPORT void pf_normalise(const float *row, const float *weight, i64 width, float epsilon, float *out) {
    normalise(row, weight, width, epsilon, out);
}
EXPORT void pf_rotate(const float *row, const float *cosines, const float *sines, i64 half, float *out) {
    rotate(row, cosines, sines, half, out);
}
EXPORT void pf_activate(i64 is_gelu, const float *gate, const float *up, float *out, i64 width) {
    (is_gelu ? gelu : silu)(gate, up, out, width);
}
// A row's pieces in turn by so many threads; best: one for each, and the row's is left in the first.
EXPORT void pf_find_best(const float *row, i64 num, i64 piece, Best *best, i64 num_threads) {
    for (i64 first = 0; first < num; first += piece)
        look_for_best(row, first, first + piece < num ? first + piece : num, best + first / piece % num_threads);
    for (i64 other = 1; other < num_threads; other++) keep_better(best[other], best);
}
EXPORT void pf_exponentials(const Ziggurat *table, uint64_t low, uint64_t high, i64 num, double least, double *out) {
    exponentials(*table, low, high, num, least, out);
}
EXPORT void pf_unpack_bytes(const uint8_t *tile, i64 lane, float scale, i64 width, float *out) {
    unpack_bytes(tile, lane, scale, width, out);
}
EXPORT void pf_unpack_groups(const uint8_t *tile, const uint16_t *scales, i64 lane, float factor, i64 width, float *out) {
    unpack_groups(tile, scales, lane, factor, width, out);
}
// The same bytes only read, as fast as they come: what products are measured against.
EXPORT void pf_read(i64 num_threads, const i64 *memories, i64 num_memories, i64 num_bytes) {
    Body body = [](i64 phase, const i64 *words) {
        i64 num_bytes = words[0], num_jobs = (num_bytes + JOB_BYTES - 1) / JOB_BYTES, result = 0;
        Ahead ahead = {nullptr, nullptr};
        for (i64 number = 2; number < 2 + words[1]; number++) {
            i64 num_done = 0;
            for (i64 job; (job = take(phase)) < num_jobs; num_done++) {
                const char *memory = (const char *)words[number] + job * JOB_BYTES;
                i64 size = num_bytes - job * JOB_BYTES < JOB_BYTES ? num_bytes - job * JOB_BYTES : JOB_BYTES;
                result += sum_of_bytes(memory, size);
            }
            phase = finish(phase, num_jobs, num_done, &ahead);
        }
        static volatile i64 sink;  // or the compiler would read nothing
        sink = result;
    };
    crew().run(num_threads, num_memories, body, [&](std::vector<i64> &words) {
        words.assign({num_bytes, num_memories});
        words.insert(words.end(), memories, memories + num_memories);
    });
}
