/* The memory format of a row of the KV cache, and the conversion of 8-bit codes to fp32. A row is the key or the value
 * of one head of one token.
 *
 * An 8-bit row is D codes and then their fp32 scale: element = code * scale. fp32 and bf16 represent codes exactly, so
 * attention multiplies the codes themselves. It multiplies the scores of a key by the key's scale, and the softmax
 * weights of a value by the value's scale. */
#pragma once
#include "simd.h"

/* ops/native.py has the same numbers. KV_PAIRED: unquantized; the elements of the values of two neighbouring tokens
 * alternate in memory (v_is_paired). */
enum { KV_PLAIN, KV_PAIRED, KV_INT8, KV_FP8 };

#define SCALE_BYTES 4

INLINE int in_eight_bits(const int kv_format) { return kv_format >= KV_INT8; }

INLINE long kv_row_bytes(int kv_format, long d, long element_size) {
    return in_eight_bits(kv_format) ? d + SCALE_BYTES : d * element_size;
}

/* Returns the scale of a row whose codes begin at `row`. */
INLINE float row_scale(const char *row, long d) {
    float scale;
    __builtin_memcpy(&scale, row + d, sizeof scale);
    return scale;
}

#if SIMD_WIDTH == 16
typedef __m256i Codes;
INLINE Codes load_codes(const char *from) { return _mm256_loadu_si256((const __m256i *)from); }
#else
typedef __m128i Codes;
INLINE Codes load_codes(const char *from) { return _mm_loadu_si128((const __m128i *)from); }
#endif

/* Shifting the bits of an e4m3 number makes them an fp16 number, which is too small by this factor. The conversion from
 * fp16 does not flush denormals. */
#define FP8_FACTOR 256.0f

/* Converts 2 * SIMD_WIDTH codes to fp32. The result for KV_FP8 is the code's value divided by FP8_FACTOR. */
INLINE void widen_codes(Codes x, vf out[2], const int kv_format) {
#if SIMD_WIDTH == 16
    if (kv_format == KV_INT8) {
        out[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
        out[1] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
    } else {
        __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(x), 7);
        __m512i half = _mm512_and_si512(shifted, _mm512_set1_epi16(0xbf80 - 65536));
        out[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
        out[1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    }
#else
    if (kv_format == KV_INT8) {
        out[0] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
        out[1] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
    } else {
        __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
        __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbf80 - 65536));
        out[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
        out[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
#endif
}
