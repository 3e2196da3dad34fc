// 16 lanes of 32 bits, whatever the registers hold: one small set of operations, written once per instruction set.
//
// It does not know products or models. The one trick: each operation rounds alike everywhere (no contraction, fma only
// where it is written, sums across lanes in one order), so all instruction sets give the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))
typedef int64_t i64;

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512VNNI__)
#define KIND "vnni512"
#define MOST_ROWS 8  // that fit the registers, with their sums
typedef __m512 F;
typedef __m512i I;
INLINE F splat(float x) { return _mm512_set1_ps(x); }
INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void store(float *p, F x) { _mm512_storeu_ps(p, x); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F magnitude(F a) { return _mm512_abs_ps(a); }
INLINE F whole(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F largest(F a, F b) {  // NaN if one is: the instruction gives its second operand then
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}
INLINE F least(float bound, F x) { return _mm512_min_ps(splat(bound), x); }   // x if it is NaN
INLINE F most(float bound, F x) { return _mm512_max_ps(splat(bound), x); }
INLINE F zero_below(F x, float bound, F y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, splat(bound), _CMP_LT_OQ), _mm512_setzero_ps());
}
INLINE F zero_if_nan(F x, F y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), y); }
INLINE F scale_by_power(F x, F power) {  // x * 2^power, by adding to the exponent
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_cvttps_epi32(power), 23)));
}
INLINE I zeros() { return _mm512_setzero_si512(); }
INLINE I splat_int(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I load_int(const void *p) { return _mm512_loadu_si512(p); }
INLINE I low_halves(I x) { return _mm512_and_si512(x, splat_int(0x0F0F0F0F)); }
INLINE I high_halves(I x) { return _mm512_and_si512(_mm512_srli_epi32(x, 4), splat_int(0x0F0F0F0F)); }
INLINE F to_float(I x) { return _mm512_cvtepi32_ps(x); }
INLINE F from_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
template <int BITS> INLINE I dot(I sums, I u, I s) { return _mm512_dpbusd_epi32(sums, u, s); }
INLINE int32_t to_bytes(F x, int8_t *out) {  // whole numbers in +-127; returns their sum
    I words = _mm512_cvttps_epi32(x);
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(words));
    return _mm512_reduce_add_epi32(words);
}
#define HALVES(op, v)                                                                          \
    __m256 h = op##256(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));

#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
#define KIND "vnni256"
#else
#define KIND "avx2"
#endif
#define MOST_ROWS 4
struct F { __m256 a, b; };
struct I { __m256i a, b; };
#define BOTH(x) F{x(a), x(b)}
#define MAP2(name, op) INLINE F name(F x, F y) { return {op(x.a, y.a), op(x.b, y.b)}; }
MAP2(add, _mm256_add_ps)
MAP2(sub, _mm256_sub_ps)
MAP2(mul, _mm256_mul_ps)
MAP2(div, _mm256_div_ps)
INLINE F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float *p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE __m256 magnitude256(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE F magnitude(F x) { return {magnitude256(x.a), magnitude256(x.b)}; }
INLINE __m256 whole256(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F whole(F x) { return {whole256(x.a), whole256(x.b)}; }
INLINE __m256 larger256(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
MAP2(largest, larger256)
INLINE F least(float bound, F x) { F c = splat(bound); return {_mm256_min_ps(c.a, x.a), _mm256_min_ps(c.b, x.b)}; }
INLINE F most(float bound, F x) { F c = splat(bound); return {_mm256_max_ps(c.a, x.a), _mm256_max_ps(c.b, x.b)}; }
INLINE F zero_below(F x, float bound, F y) {
    __m256 c = _mm256_set1_ps(bound);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, c, _CMP_LT_OQ), y.a),
            _mm256_andnot_ps(_mm256_cmp_ps(x.b, c, _CMP_LT_OQ), y.b)};
}
INLINE F zero_if_nan(F x, F y) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, x.a, _CMP_ORD_Q), y.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, x.b, _CMP_ORD_Q), y.b)};
}
INLINE __m256 power256(__m256 x, __m256 n) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvttps_epi32(n), 23)));
}
MAP2(scale_by_power, power256)
INLINE I zeros() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I load_int(const void *p) {
    return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE I low_halves(I x) {
    __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
INLINE I high_halves(I x) { return low_halves({_mm256_srli_epi32(x.a, 4), _mm256_srli_epi32(x.b, 4)}); }
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE F from_half(const void *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))};
}
template <int BITS> INLINE __m256i dot256(__m256i c, __m256i u, __m256i s) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(c, u, s);
#else
    if (BITS == 4)  // 2 * 15 * 128 fits 16 bits, so the older instruction cannot saturate
        return _mm256_add_epi32(c, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
    __m256i even = _mm256_and_si256(u, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(u, 8);
    c = _mm256_add_epi32(c, _mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8)));
    return _mm256_add_epi32(c, _mm256_madd_epi16(odd, _mm256_srai_epi16(s, 8)));
#endif
}
template <int BITS> INLINE I dot(I c, I u, I s) { return {dot256<BITS>(c.a, u.a, s.a), dot256<BITS>(c.b, u.b, s.b)}; }
INLINE int32_t to_bytes(F x, int8_t *out) {
    int32_t words[16], sum = 0;
    _mm256_storeu_si256((__m256i *)words, _mm256_cvttps_epi32(x.a));
    _mm256_storeu_si256((__m256i *)words + 1, _mm256_cvttps_epi32(x.b));
    for (int i = 0; i < 16; i++) out[i] = (int8_t)words[i], sum += words[i];
    return sum;
}
#define HALVES(op, v) __m256 h = op##256((v).a, (v).b);

#else
#if defined(__aarch64__)
#define KIND "neon"  // the loops below, as the compiler makes vectors of them; untested
#else
#define KIND "plain"
#endif
#define MOST_ROWS 4
struct F { float v[16]; };
struct I { int32_t v[16]; };
#define EACH for (int i = 0; i < 16; i++)
#define MAP2(name, expression) INLINE F name(F a, F b) { F r; EACH r.v[i] = expression; return r; }
MAP2(add, a.v[i] + b.v[i])
MAP2(sub, a.v[i] - b.v[i])
MAP2(mul, a.v[i] * b.v[i])
MAP2(div, a.v[i] / b.v[i])
INLINE float larger(float a, float b) { return a != a ? a : a > b ? a : b; }
MAP2(largest, larger(a.v[i], b.v[i]))
INLINE F splat(float x) { F r; EACH r.v[i] = x; return r; }
INLINE F load(const float *p) { F r; memcpy(r.v, p, 64); return r; }
INLINE void store(float *p, F x) { memcpy(p, x.v, 64); }
INLINE F fma(F a, F b, F c) { F r; EACH r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return r; }
INLINE F magnitude(F a) { F r; EACH r.v[i] = __builtin_fabsf(a.v[i]); return r; }
INLINE F whole(F a) { F r; EACH r.v[i] = __builtin_rintf(a.v[i]); return r; }
INLINE F least(float bound, F x) { F r; EACH r.v[i] = bound < x.v[i] ? bound : x.v[i]; return r; }
INLINE F most(float bound, F x) { F r; EACH r.v[i] = bound > x.v[i] ? bound : x.v[i]; return r; }
INLINE F zero_below(F x, float bound, F y) { F r; EACH r.v[i] = x.v[i] < bound ? 0.0f : y.v[i]; return r; }
INLINE F zero_if_nan(F x, F y) { F r; EACH r.v[i] = x.v[i] == x.v[i] ? y.v[i] : 0.0f; return r; }
INLINE F scale_by_power(F x, F n) {
    uint32_t bits[16];
    memcpy(bits, x.v, 64);
    EACH bits[i] += (uint32_t)(int32_t)n.v[i] << 23;
    memcpy(x.v, bits, 64);
    return x;
}
INLINE I zeros() { return I{}; }
INLINE I splat_int(int32_t x) { I r; EACH r.v[i] = x; return r; }
INLINE I load_int(const void *p) { I r; memcpy(r.v, p, 64); return r; }
INLINE I low_halves(I x) { EACH x.v[i] &= 0x0F0F0F0F; return x; }
INLINE I high_halves(I x) { EACH x.v[i] = (int32_t)((uint32_t)x.v[i] >> 4) & 0x0F0F0F0F; return x; }
INLINE F to_float(I x) { F r; EACH r.v[i] = (float)x.v[i]; return r; }
INLINE F from_half(const void *p) {
    uint16_t halves[16];
    memcpy(halves, p, 32);
    F r;
    EACH {  // bits in place, then the exponent: exact
        uint32_t size = (uint32_t)(halves[i] & 0x7FFF) << 13, sign = (uint32_t)(halves[i] & 0x8000) << 16;
        float value;
        memcpy(&value, &size, 4);
        value *= 0x1p112f;
        memcpy(&size, &value, 4);
        size |= sign;
        memcpy(&r.v[i], &size, 4);
    }
    return r;
}
template <int BITS> INLINE I dot(I sums, I u, I s) {
    uint8_t a[64];
    int8_t b[64];
    memcpy(a, u.v, 64), memcpy(b, s.v, 64);
    EACH sums.v[i] += a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] +
                      a[4 * i + 3] * b[4 * i + 3];
    return sums;
}
INLINE int32_t to_bytes(F x, int8_t *out) {
    int32_t sum = 0;
    EACH {
        int32_t word = (int32_t)x.v[i];
        out[i] = (int8_t)word, sum += word;
    }
    return sum;
}
#endif

// All lanes into one, halves upon halves.
#if defined(__AVX2__)
INLINE __m256 plus256(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
INLINE __m128 plus128(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
#if defined(__AVX512VNNI__)
INLINE __m256 larger256(__m256 a, __m256 b) {
    return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
#endif
INLINE __m128 larger128(__m128 a, __m128 b) { return _mm_blendv_ps(_mm_max_ps(a, b), a, _mm_cmpunord_ps(a, a)); }
#define REDUCE(name, op)                                                                       \
    INLINE float name(F v) {                                                                   \
        HALVES(op, v)                                                                          \
        __m128 q = op##128(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));            \
        q = op##128(q, _mm_movehl_ps(q, q));                                                   \
        return _mm_cvtss_f32(op##128(q, _mm_shuffle_ps(q, q, 1)));                             \
    }
REDUCE(total, plus)
REDUCE(largest_lane, larger)
#else
#define REDUCE(name, op)                                                                       \
    INLINE float name(F v) {                                                                   \
        for (int width = 8; width; width /= 2)                                                 \
            for (int i = 0; i < width; i++) v.v[i] = op(v.v[i], v.v[i + width]);               \
        return v.v[0];                                                                         \
    }
INLINE float plus(float a, float b) { return a + b; }
REDUCE(total, plus)
REDUCE(largest_lane, larger)
#endif

// e to the x, to 2 units in the last place; 0 below -87; NaN stays NaN. The Cephes polynomial.
INLINE F exponential(F given) {
    F x = least(88.0f, most(-87.0f, given));
    F n = whole(mul(x, splat(1.4426950408889634f)));
    F r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
    F p = splat(1.9875691500e-4f);
    const float rest[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                          5.0000001201e-1f, 1.0f, 1.0f};
    for (float c : rest) p = fma(p, r, splat(c));
    return zero_below(given, -87.0f, scale_by_power(p, zero_if_nan(x, n)));
}
