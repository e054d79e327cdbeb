/* Numbers that are kept narrower than they are computed with: all arithmetic is in float32. */
#ifndef TERCET_NARROW_H
#define TERCET_NARROW_H

#include "vector.h"

/* How numbers are kept. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

INLINE long kind_bytes(long kind) { return kind == FLOAT32 ? 4 : 2; }

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* A finite float16. The exponent moves from 5 to 8 bits by a product. */
INLINE float wide_half(uint16_t x) {
    const float magnitude = of_bits((uint32_t)(x & 0x7fff) << 13) * 0x1p112f;
    return x & 0x8000 ? -magnitude : magnitude;
}

/* To the nearest float16, ties to even, of a number within its range. */
INLINE uint16_t narrow_half(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    /* Subnormal results: adding 0.5 leaves the multiple of 2^-24 in the low bits. */
    const float magnitude = of_bits(bits_of(x) & 0x7fffffffu);
    if (magnitude < 0x1p-14f) return (uint16_t)(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)));
    uint32_t bits = bits_of(magnitude);
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}

/* Neighbouring words, each with 16 zeros above it. */
INLINE vu load_words(const void *from) {
#if defined(__aarch64__)
    return (vu)vmovl_u16(vld1_u16(from));
#else
    vh words;
    memcpy(&words, from, sizeof words);
    return __builtin_convertvector(words, vu);
#endif
}

INLINE vf widen_half(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    const vu bits = load_words(from);
    const vf magnitude = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)magnitude | (bits & 0x8000) << 16);
#endif
}

INLINE void store_half(uint16_t *to, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++) to[i] = narrow_half(x[i]);
#endif
}

/* A vector of numbers, of which `from` is the first. */
INLINE vf load_as(const int kind, const void *from) {
    if (kind == FLOAT32) return load(from);
    if (kind == FLOAT16) return widen_half(from);
    return (vf)(load_words(from) << 16);
}

/* To the nearest that the kind holds, ties to even. What is not finite is replaced: NaN by zero, and what is beyond the
 * kind's largest number by that. */
INLINE void store_finite(const int kind, void *to, vf x) {
    const vf most = all(kind == FLOAT32 ? 0x1.fffffep127f : kind == FLOAT16 ? 65504.0f : 0x1.fep127f);
    x = pick(x == x, smaller(larger(x, -most), most), (vf){0});
    if (kind == FLOAT32) store(to, x);
    else if (kind == FLOAT16) store_half(to, x);
    else {
        const vu bits = (vu)x;
        const vh words = __builtin_convertvector((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, vh);
        memcpy(to, &words, sizeof words);
    }
}

/* Where element `index` of an array of this kind lies. */
INLINE const char *place_of(const int kind, const void *array, long index) {
    return (const char *)array + index * kind_bytes(kind);
}

#endif
