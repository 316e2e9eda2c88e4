/* The vector vocabulary of every kernel: one register of LANES floats, fp32 or bf16 in memory.
 *
 * Compiled once per instruction set (SUFFIX names it); nothing here knows a shape or a thread.
 * A tail shorter than a register goes through the same arithmetic on a zero-filled copy, so a value's bits do
 * not depend on where in its row it stands. */
#pragma once
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __AVX512F__
#define LANES 16
#ifdef __AVX512BF16__
#define SUFFIX avx512bf16
#else
#define SUFFIX avx512
#endif
#else
#define LANES 8
#define SUFFIX avx2
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;

#define JOIN_(name, suffix) name##_##suffix
#define JOIN(name, suffix) JOIN_(name, suffix)
#define EXPORT(name) __attribute__((visibility("default"))) void JOIN(name, SUFFIX)
#define INLINE static inline __attribute__((always_inline))
/* One compiled body per formula: callers that share it share its bits. */
#define SHARED static __attribute__((noinline))

INLINE vf splat(float x) { return (vf){0} + x; }
INLINE vf as_float(vu x) { return (vf)x; }
INLINE vu as_bits(vf x) { return (vu)x; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#if LANES == 16
INLINE vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf larger(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf smaller(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#endif

INLINE float one_float(bf16 x) {
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

/* (Of __builtin_convertvector the compiler makes two halves, and five instructions.) */
#if LANES == 16
INLINE vu widened(vh x) { return (vu)_mm512_cvtepu16_epi32((__m256i)x); }
#else
INLINE vu widened(vh x) { return (vu)_mm256_cvtepu16_epi32((__m128i)x); }
#endif

INLINE vf load_bf16(const bf16 *p) {
    vh half;
    __builtin_memcpy(&half, p, sizeof half);
    return as_float(widened(half) << 16);
}

/* Nearest even; a NaN stays a NaN. (The instruction makes a denormal zero, as do those that multiply bf16.) */
#ifdef __AVX512BF16__
INLINE vh to_bf16(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }
#else
INLINE vh to_bf16(vf x) {
    vu bits = as_bits(x);
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (vu)(x != x);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vh);
}
#endif

INLINE void store_bf16(bf16 *p, vf x) {
    vh half = to_bf16(x);
    __builtin_memcpy(p, &half, sizeof half);
}

/* What x reads as once stored: fp32 as it is, bf16 rounded. `is_bf16` is a constant wherever this is inlined. */
INLINE vf rounded(vf x, int is_bf16) {
    return is_bf16 ? as_float(widened(to_bf16(x)) << 16) : x;
}

/* Elements [i, i + LANES) of a row of n; beyond n zeros. */
INLINE vf load(const void *row, long i, long n, int is_bf16) {
    if (i + LANES <= n) return is_bf16 ? load_bf16((const bf16 *)row + i) : load_f32((const float *)row + i);
    float tail[LANES] = {0};
    for (long j = i; j < n; j++) tail[j - i] = is_bf16 ? one_float(((const bf16 *)row)[j]) : ((const float *)row)[j];
    return load_f32(tail);
}

INLINE void store(void *row, long i, long n, vf x, int is_bf16) {
    if (i + LANES <= n) {
        if (is_bf16) store_bf16((bf16 *)row + i, x);
        else store_f32((float *)row + i, x);
        return;
    }
    vh half = to_bf16(x);
    for (long j = i; j < n; j++) {
        if (is_bf16) ((bf16 *)row)[j] = half[j - i];
        else ((float *)row)[j] = x[j - i];
    }
}

/* Neighbours at half the width first, then at a quarter of it and so on. */
INLINE float sum_lanes(vf x) {
#if LANES == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
    __m256 half = (__m256)x;
#endif
    __m128 quad = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quad = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(quad, _mm_movehdup_ps(quad)));
}

/* e^x to about one ulp for x in [-87, 88]; outside it is clamped. Cephes' expf polynomial. */
INLINE vf exp_lanes(vf x) {
    x = larger(smaller(x, splat(88.0f)), splat(-87.0f)); /* a NaN becomes -87 or 88 */
    const vf magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
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
