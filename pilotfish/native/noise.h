// Unit exponentials for the race of `coupled` (decoding/noise.py), number for number those that numpy draws there.
//
// It does not know what they are for. The one trick: Philox is a function of a counter (Salmon et al., SC'11), so blocks
// of it are made ahead and side by side. Of them the ziggurat (Marsaglia and Tsang 2000) takes one number a draw, and
// now and then more. Both are stated here as numpy has them: 64-bit words, 256 layers, tables from the area under exp.
#pragma once
#include "lanes.h"

struct Ziggurat {  // noise.py fills it: 64-bit floats would not do
    uint64_t below[256];             // words under these are inside their layer's rectangle
    double width[256], height[256];  // of a layer, by 2^-53; of the curve at its edge
    double tail;
};

class Philox {
    static constexpr int NUM_BLOCKS = 64, TOGETHER = 2;  // so many wait for each other's products
    uint64_t key[2], counter = 1;  // numpy counts before it draws
    uint64_t words[4 * NUM_BLOCKS];
    int place = 4 * NUM_BLOCKS;

    void refill() {
        for (int block = 0; block < NUM_BLOCKS; block += TOGETHER) {
            uint64_t c[TOGETHER][4], k0 = key[0], k1 = key[1];
            for (int i = 0; i < TOGETHER; i++) c[i][0] = counter++, c[i][1] = c[i][2] = c[i][3] = 0;
#pragma GCC unroll 10
            for (int round = 0; round < 10; round++) {
#pragma GCC unroll 4
                for (int i = 0; i < TOGETHER; i++) {
                    unsigned __int128 a = (unsigned __int128)c[i][0] * 0xD2E7470EE14C6C93;
                    unsigned __int128 b = (unsigned __int128)c[i][2] * 0xCA5A826395121157;
                    c[i][0] = (uint64_t)(b >> 64) ^ c[i][1] ^ k0, c[i][1] = (uint64_t)b;
                    c[i][2] = (uint64_t)(a >> 64) ^ c[i][3] ^ k1, c[i][3] = (uint64_t)a;
                }
                k0 += 0x9E3779B97F4A7C15, k1 += 0xBB67AE8584CAA73B;
            }
            memcpy(words + 4 * block, c, sizeof c);
        }
        place = 0;
    }

public:
    Philox(uint64_t low, uint64_t high) : key{low, high} {}

    uint64_t next() {
        if (place == 4 * NUM_BLOCKS) refill();
        return words[place++];
    }
    double uniform() { return (double)(i64)(next() >> 11) * 0x1p-53; }
};

// least: what smaller draws become.
static void exponentials(const Ziggurat &table, uint64_t low, uint64_t high, i64 num, double least, double *out) {
    Philox words(low, high);
    for (i64 i = 0; i < num;) {
        uint64_t word = words.next() >> 3, layer = word & 255;
        word >>= 8;
        double x = (double)(i64)word * table.width[layer];
        if (word >= table.below[layer]) {
            if (layer == 0)
                x = table.tail - log1p(-words.uniform());
            else if (!((table.height[layer - 1] - table.height[layer]) * words.uniform() + table.height[layer] < exp(-x)))
                continue;
        }
        out[i++] = x < least ? least : x;
    }
}
