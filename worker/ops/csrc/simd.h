/* SIMD types and functions that all kernels use. One register holds SIMD_WIDTH floats. In memory, numbers are fp32 or
 * bf16.
 *
 * This file is compiled once per instruction set; SUFFIX is the name of the instruction set. A tail shorter than a
 * register is padded with zeros and computed like a whole register, so the bits of a value do not depend on its place
 * in the row. */
#pragma once
#include "intrinsics.h"
#include <stddef.h>

#ifdef __AVX512F__
#define SIMD_WIDTH 16
#else
#define SIMD_WIDTH 8
#endif
#ifdef SUFFIX /* the AMX kernels define SUFFIX themselves */
#elif defined(__AVX512BF16__)
#define SUFFIX avx512bf16
#elif defined(__AVX512F__)
#define SUFFIX avx512
#elif defined(__AVXVNNI__)
#define SUFFIX avxvnni
#elif defined(__x86_64__)
#define SUFFIX avx2
#elif defined(__ARM_FEATURE_DOTPROD)
#define SUFFIX dotprod
#else
#define SUFFIX neon
#endif

typedef float vf __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef uint16_t vh __attribute__((vector_size(2 * SIMD_WIDTH)));
typedef uint16_t bf16;

#define JOIN_(name, suffix) name##_##suffix
#define JOIN(name, suffix) JOIN_(name, suffix)
#define EXPORT(name) __attribute__((visibility("default"))) void JOIN(name, SUFFIX)
#define INLINE static inline __attribute__((always_inline))
/* A formula marked NOINLINE is compiled once, so all callers get the same bits. */
#define NOINLINE static __attribute__((noinline))

INLINE vf as_float(vu x) { return (vf)x; }
INLINE vu as_bits(vf x) { return (vu)x; }
INLINE vf simd_select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#if SIMD_WIDTH == 16
INLINE vf broadcast(float x) { return (vf)_mm512_set1_ps(x); }
INLINE vf simd_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf simd_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf simd_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf broadcast(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vf simd_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf simd_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf simd_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#endif

/* Returns a * b, rounded: the compiler cannot fuse it with an addition that follows. */
INLINE vf rounded_product(vf a, vf b) {
    vf product = a * b;
#ifdef __x86_64__
    __asm__("" : "+v"(product));
#else /* a NEON register holds half of `product` */
    __asm__("" : "+w"(((float32x4_t *)&product)[0]), "+w"(((float32x4_t *)&product)[1]));
#endif
    return product;
}

INLINE float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}

INLINE vf load_f32(const float *p) {
    vf out;
    __builtin_memcpy(&out, p, sizeof out);
    return out;
}

INLINE void store_f32(float *p, vf x) { __builtin_memcpy(p, &x, sizeof x); }

/* widen_u16 uses an intrinsic because gcc would compile __builtin_convertvector to five instructions on two halves. */
#if SIMD_WIDTH == 16
INLINE vu widen_u16(vh x) { return (vu)_mm512_cvtepu16_epi32((__m256i)x); }
#else
INLINE vu widen_u16(vh x) { return (vu)_mm256_cvtepu16_epi32((__m128i)x); }
#endif

INLINE vf load_bf16(const bf16 *p) {
    vh half;
    __builtin_memcpy(&half, p, sizeof half);
    return as_float(widen_u16(half) << 16);
}

/* Converts fp32 to bf16, rounding to nearest even. A NaN stays a NaN. The AVX512-BF16 instruction flushes denormals to
 * zero, and so do the products of bf16 numbers. */
#ifdef __AVX512BF16__
INLINE vh to_bf16(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }
#else
INLINE vu bf16_bits(vf x) {
    vu bits = as_bits(x);
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (vu)(x != x);
    return (rounded & ~nan) | (nan & 0x7fc0);
}
INLINE vh to_bf16(vf x) { return __builtin_convertvector(bf16_bits(x), vh); }
#endif

INLINE void store_bf16(bf16 *p, vf x) {
    vh half = to_bf16(x);
    __builtin_memcpy(p, &half, sizeof half);
}

/* Returns the value of x after a store and a load: unchanged for fp32, rounded for bf16. Every caller passes a constant
 * `is_bf16`. */
INLINE vf rounded(vf x, int is_bf16) { return is_bf16 ? as_float(widen_u16(to_bf16(x)) << 16) : x; }

/* Loads elements [i, i + SIMD_WIDTH) of a row of n elements, with zeros beyond n. */
INLINE vf load(const void *row, long i, long n, int is_bf16) {
    if (i + SIMD_WIDTH <= n) return is_bf16 ? load_bf16((const bf16 *)row + i) : load_f32((const float *)row + i);
    float tail[SIMD_WIDTH] = {0};
    for (long j = i; j < n; j++)
        tail[j - i] = is_bf16 ? bf16_to_float(((const bf16 *)row)[j]) : ((const float *)row)[j];
    return load_f32(tail);
}

INLINE void store(void *row, long i, long n, vf x, int is_bf16) {
    if (i + SIMD_WIDTH <= n) {
        if (is_bf16)
            store_bf16((bf16 *)row + i, x);
        else
            store_f32((float *)row + i, x);
        return;
    }
    vh half = to_bf16(x);
    for (long j = i; j < n; j++) {
        if (is_bf16)
            ((bf16 *)row)[j] = half[j - i];
        else
            ((float *)row)[j] = x[j - i];
    }
}

/* Returns the sum of all elements of a register. It first adds elements half a register apart, then a quarter, etc. */
INLINE float simd_sum(vf x) {
#if SIMD_WIDTH == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
    __m256 half = (__m256)x;
#endif
    __m128 quad = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quad = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(quad, _mm_movehdup_ps(quad)));
}

INLINE float simd_reduce_max(vf x) {
#if SIMD_WIDTH == 16
    return _mm512_reduce_max_ps((__m512)x);
#else
    __m128 quad = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    quad = _mm_max_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_max_ss(quad, _mm_movehdup_ps(quad)));
#endif
}

/* Returns e^x within about one ulp for x in [-87, 88]; x is clamped to this range. The polynomial comes from
 * Cephes' expf. */
INLINE vf simd_exp(vf x) {
    x = simd_max(simd_min(x, broadcast(88.0f)), broadcast(-87.0f)); /* a NaN becomes -87 or 88 */
    const vf magic = broadcast(12582912.0f);                        /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = x * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    vi exponent = (vi)as_bits(shifted) << 23;
    return (vf)((vi)p + exponent);
}

/* Returns tanh(x) with a relative error below 2e-7. The polynomial for |x| < 0.625 comes from Cephes' tanhf. */
INLINE vf simd_tanh(vf x) {
    vf size = as_float(as_bits(x) & 0x7fffffffu), square = x * x;
    vf p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    vf large = 1.0f - 2.0f / (simd_exp(size + size) + 1.0f);
    large = as_float(as_bits(large) | (as_bits(x) & 0x80000000u));
    return simd_select(size < 0.625f, x + x * (square * p), large);
}

/* Returns erf(x) with a relative error below 5e-7: x times a quotient of polynomials in x^2, for x clamped to [-4, 4],
 * beyond which erf is 1 in fp32. */
INLINE vf simd_erf(vf x) {
    x = simd_max(simd_min(x, broadcast(4.0f)), broadcast(-4.0f));
    vf square = x * x;
    vf p = square * -2.72614225801306e-10f + 2.77068142495902e-08f;
    p = p * square - 2.10102402082508e-06f;
    p = p * square - 5.69250639462346e-05f;
    p = p * square - 7.34990630326855e-04f;
    p = p * square - 2.95459980854025e-03f;
    p = p * square - 1.60960333262415e-02f;
    vf q = square * -1.45660718464996e-05f - 2.13374055278905e-04f;
    q = q * square - 1.68282697438203e-03f;
    q = q * square - 7.37332916720468e-03f;
    q = q * square - 1.42647390514189e-02f;
    return x * p / q;
}

/* Returns e^x - 1 = tanh(x / 2) (e^x + 1) for x <= 0, with a relative error below 1e-6. */
INLINE vf simd_expm1(vf x) { return simd_tanh(0.5f * x) * (simd_exp(x) + 1.0f); }
