/* Vectors of 16 floats in the compiler's own notation: one source for every instruction set.
 *
 * A product and the sum it goes into are fused to one rounding wherever the target can (the build passes
 * -ffp-contract=fast), and every loop below adds in the order that is written. So an element of a result is the same
 * bits whatever rows or tokens are computed beside it. */
#ifndef TERCET_VECTOR_H
#define TERCET_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

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
#else
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return pick(a < b, a, b); }
#endif

/* Always in this order, so that it never depends on the compiler's choice. */
INLINE float sum(vf x) {
    float half[8], quarter[4];
    for (int i = 0; i < 8; i++) half[i] = x[i] + x[i + 8];
    for (int i = 0; i < 4; i++) quarter[i] = half[i] + half[i + 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

INLINE float largest(vf x) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int width = 8; width; width /= 2) x = larger(x, __builtin_shuffle(x, lane ^ width));
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
