/* Vectors of floats as wide as the target's registers, through the vector extensions of GCC and Clang: one source for
   AVX-512, AVX2, NEON and whatever else has 128 bits. */
#ifndef LEGATO_SIMD_H
#define LEGATO_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES))); /* the upper halves of floats: bfloat16 */

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vu load_u32(const void *p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vi splat_int(int32_t x) { return x - (vi){0}; }

INLINE vf as_float(vu v) { return (vf)v; }

INLINE vf pick(vi condition, vf yes, vf no) { return (vf)((condition & (vi)yes) | (~condition & (vi)no)); }

INLINE vf vmax(vf a, vf b) { return pick(a > b, a, b); }

INLINE vf load_bf16(const uint16_t *p) {
    vh v;
    memcpy(&v, p, sizeof v);
    return as_float(__builtin_convertvector(v, vu) << 16);
}

/* Round to nearest, ties to even; what is not a number stays so. */
INLINE void store_bf16(uint16_t *p, vf v) {
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    vi is_nan = v != v;
    vh half = __builtin_convertvector(((vu)is_nan & nan) | (~(vu)is_nan & rounded), vh);
    memcpy(p, &half, sizeof half);
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* {f(0), f(1), ...}: the lists of lanes that shuffles take must be constants. */
#if LANES == 16
#define EACH_LANE(f) \
    {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#elif LANES == 8
#define EACH_LANE(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}
#else
#define EACH_LANE(f) {f(0), f(1), f(2), f(3)}
#endif
#define SAME(j) (j)
#if defined(__clang__)
INLINE vf shuffle(vf a, vf b, vi lanes) {
    vf out;
    for (int i = 0; i < LANES; i++) out[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
    return out;
}
#define SHUFFLE(a, b, lanes) shuffle(a, b, (vi)EACH_LANE(lanes))
#else
#define SHUFFLE(a, b, lanes) __builtin_shuffle(a, b, (vi)EACH_LANE(lanes))
#endif

#define ACROSS_1(j) ((j) ^ 1)
#define ACROSS_2(j) ((j) ^ 2)
#define ACROSS_4(j) (((j) ^ 4) % LANES)
#define ACROSS_8(j) (((j) ^ 8) % LANES)

/* v = combine(v, v exchanged over a distance) for each distance: every lane then has what all combine to. */
#if LANES == 16
#define COMBINE_LANES(combine, v)                 \
    v = combine(v, SHUFFLE(v, v, ACROSS_8));      \
    v = combine(v, SHUFFLE(v, v, ACROSS_4));      \
    v = combine(v, SHUFFLE(v, v, ACROSS_2));      \
    v = combine(v, SHUFFLE(v, v, ACROSS_1))
#elif LANES == 8
#define COMBINE_LANES(combine, v)                 \
    v = combine(v, SHUFFLE(v, v, ACROSS_4));      \
    v = combine(v, SHUFFLE(v, v, ACROSS_2));      \
    v = combine(v, SHUFFLE(v, v, ACROSS_1))
#else
#define COMBINE_LANES(combine, v)                 \
    v = combine(v, SHUFFLE(v, v, ACROSS_2));      \
    v = combine(v, SHUFFLE(v, v, ACROSS_1))
#endif

INLINE vf vadd(vf a, vf b) { return a + b; }

INLINE float sum(vf v) {
    COMBINE_LANES(vadd, v);
    return v[0];
}

INLINE float largest(vf v) {
    COMBINE_LANES(vmax, v);
    return v[0];
}

/* e^x to about one unit in the last place; 0 below -87. Range reduction and polynomial as in Cephes' expf (Moshier). */
INLINE vf vexp(vf x) {
    vf clamped = pick(x > splat(88.0f), splat(88.0f), pick(x < splat(-87.0f), splat(-87.0f), x));
    vf shifted = clamped * 1.44269504088896341f + 12582912.0f; /* 1.5 × 2^23: the sum's low bits are the rounded integer */
    vf n = shifted - 12582912.0f;
    vf r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi exponent = __builtin_convertvector(n, vi) << 23;
    return pick(x < splat(-87.0f), splat(0.0f), (vf)((vi)p + exponent));
}

/* From e^2x, whose error grows for small x relative to it, but not beyond a float's rounding of the 1 it is added to. */
INLINE vf vtanh(vf x) { return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f); }

/* Elements of two rows whose indices differ in bit s change places. */
#define LOW_1(j) ((j) & 1 ? LANES + ((j) ^ 1) : (j))
#define LOW_2(j) ((j) & 2 ? LANES + ((j) ^ 2) : (j))
#define LOW_4(j) ((j) & 4 ? LANES + ((j) ^ 4) : (j))
#define LOW_8(j) ((j) & 8 ? LANES + ((j) ^ 8) : (j))
#define HIGH_1(j) ((j) & 1 ? LANES + (j) : (j) ^ 1)
#define HIGH_2(j) ((j) & 2 ? LANES + (j) : (j) ^ 2)
#define HIGH_4(j) ((j) & 4 ? LANES + (j) : (j) ^ 4)
#define HIGH_8(j) ((j) & 8 ? LANES + (j) : (j) ^ 8)
#define EXCHANGE(s)                                    \
    UNROLL for (int i = 0; i < LANES; i++) {           \
        if (i & s) continue;                           \
        vf a = rows[i], b = rows[i + s];               \
        rows[i] = SHUFFLE(a, b, LOW_##s);              \
        rows[i + s] = SHUFFLE(a, b, HIGH_##s);         \
    }

/* rows[i] = the sums of lanes 2s apart in rows i and i + s, by turns: after all stages lane j of rows[0] is row j's sum. */
#define FOLD(s)                                                                                  \
    UNROLL for (int i = 0; i < LANES; i += 2 * s) {                                              \
        vf a = rows[i], b = rows[i + s];                                                         \
        rows[i] = SHUFFLE(a, b, LOW_##s) + SHUFFLE(a, b, HIGH_##s);                              \
    }

/* {sum of row 0, sum of row 1, ...}; the rows are used up. */
INLINE vf sum_each(vf rows[LANES]) {
    FOLD(1)
    FOLD(2)
#if LANES >= 8
    FOLD(4)
#endif
#if LANES >= 16
    FOLD(8)
#endif
    return rows[0];
}

/* In place, LANES × LANES. */
INLINE void transpose(vf rows[LANES]) {
    EXCHANGE(1)
    EXCHANGE(2)
#if LANES >= 8
    EXCHANGE(4)
#endif
#if LANES >= 16
    EXCHANGE(8)
#endif
}

#endif
