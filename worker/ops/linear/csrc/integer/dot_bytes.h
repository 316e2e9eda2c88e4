/* Wraps the instructions that multiply four neighbouring bytes and add the four products to a sum, for processors that
 * have such instructions.
 *
 * dot_signed multiplies codes from 0 to 15 by signed bytes, dot_unsigned by unsigned bytes. */
#pragma once
#include "simd.h"

#if SIMD_WIDTH == 16 && defined(__AVX512VNNI__)
#define HAS_DOT_BYTES
INLINE vi dot_signed(vi sum, vu codes, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x); }
INLINE vi dot_unsigned(vi sum, vu codes, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)codes); }
#elif defined(__AVXVNNI__)
#define HAS_DOT_BYTES
INLINE vi dot_signed(vi sum, vu codes, vi x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
}
INLINE vi dot_unsigned(vi sum, vu codes, vi x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)codes);
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOT_BYTES
typedef union { /* a NEON register is half of a vi */
    vi all;
    int32x4_t sums[2];
    uint32x4_t unsigned_sums[2];
    int8x16_t bytes[2];
    uint8x16_t unsigned_bytes[2];
} Halves;
INLINE vi dot_signed(vi sum, vu codes, vi x) {
    Halves s = {sum}, a = {(vi)codes}, b = {x};
    for (int i = 0; i < 2; i++) s.sums[i] = vdotq_s32(s.sums[i], a.bytes[i], b.bytes[i]);
    return s.all;
}
INLINE vi dot_unsigned(vi sum, vu codes, vi x) {
    Halves s = {sum}, a = {(vi)codes}, b = {x};
    for (int i = 0; i < 2; i++)
        s.unsigned_sums[i] = vdotq_u32(s.unsigned_sums[i], a.unsigned_bytes[i], b.unsigned_bytes[i]);
    return s.all;
}
#endif
