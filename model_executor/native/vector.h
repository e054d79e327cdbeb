/* Vectors as wide as the target's registers, in the compiler's own notation: one source for every instruction set.
 *
 * A product and the sum it goes into are fused to one rounding wherever the target can (the build passes
 * -ffp-contract=fast), and every loop below adds in the order that is written. So an element of a result is the same
 * bits whatever rows or tokens are computed beside it. */
#ifndef TERCET_VECTOR_H
#define TERCET_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Floats of a vector. A wider vector than the registers would be taken apart badly. */
#if defined(__AVX512F__)
#define LANES 16
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define LANES 8
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES 4
#define LANE_NUMBERS {0, 1, 2, 3}
#endif
/* Vector registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

INLINE vf load(const float *from) {
    vf x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, vf x) { memcpy(to, &x, sizeof x); }

INLINE vf all(float x) { return x - (vf){0}; }

/* The bits of `yes` where the mask is set, those of `no` elsewhere. */
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* The greater and the lesser; b where one is NaN. */
#if defined(__AVX512F__)
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__)
INLINE vf larger(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm_min_ps((__m128)a, (__m128)b); }
#else
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return pick(a < b, a, b); }
#endif

/* Every lane gets what the one `width`, a power of two, away has: that of its number ^ width. */
INLINE vf swapped(vf x, int width) {
#if LANES == 4
    /* Without an instruction that takes the lanes' numbers from a vector these have to be written here. */
    return width == 2 ? __builtin_shuffle(x, (vi){2, 3, 0, 1}) : __builtin_shuffle(x, (vi){1, 0, 3, 2});
#else
    const vi lane = LANE_NUMBERS;
    return __builtin_shuffle(x, lane ^ width);
#endif
}

/* Always in this order, so that it never depends on the compiler's choice. */
INLINE float sum(vf x) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) x += swapped(x, width);
    return x[0];
}

INLINE float largest(vf x) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) x = larger(x, swapped(x, width));
    return x[0];
}

/* e^x to about 1e-7 relative: x = n ln 2 + r, a polynomial for e^r, and n added to the exponent. Below -87 it gives
 * e^-87, above 88 it gives e^88. NaN stays NaN. */
INLINE vf exponential(vf x) {
    x = larger(all(-87.0f), smaller(all(88.0f), x));
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    vf shifted = x * 1.44269504088896341f + round;
    vf n = shifted - round;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi exponent = (vi)shifted << 23;
    return (vf)((vi)p + exponent);
}

/* tanh x = 1 - 2 / (e^2x + 1); near zero, where that cancels, an odd polynomial. */
INLINE vf hyperbolic_tangent(vf x) {
    vf far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    vf s = x * x;
    vf near = x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f)));
    return pick((s < 0.04f), near, far);
}

#endif
