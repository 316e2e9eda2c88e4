/* Unpacks codes to fp32 numbers, one SIMD register at a time: value(code) * scale + minimum.
 *
 * `kind` is a constant wherever these functions are inlined. */
#pragma once
#include "gemm/gemm.h"

/* A group's scales and minimums in fp32, in the order of the lanes that they are multiplied with. */
typedef struct {
    _Alignas(64) float scale[2 * PANEL];
    float minimum[2 * PANEL];
} GroupNumbers;

#if SIMD_WIDTH == 16
INLINE vf load_f16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vi widen_i8(const int8_t *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf to_float(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }
INLINE vf load_e4m3(const uint8_t *p) { /* as fp16 with a smaller exponent: bindings.py puts 256 into the factor */
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16((short)0x8000));
    __m256i rest = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    return (vf)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}
typedef vf Table;
INLINE Table load_table(const Weight *w) { return load_f32(w->values); }
INLINE vf look_up(Table table, vu codes) { return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table); }
#else
INLINE vf load_f16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vi widen_i8(const int8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vf to_float(vi x) { return (vf)_mm256_cvtepi32_ps((__m256i)x); }
INLINE vf load_e4m3(const uint8_t *p) { /* as fp16 with a smaller exponent: bindings.py puts 256 into the factor */
    __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16((short)0x8000));
    __m128i rest = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
    return (vf)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
}
typedef struct {
    vf low, high; /* the numbers of the codes 0 to 7, and 8 to 15 */
} Table;
INLINE Table load_table(const Weight *w) { return (Table){load_f32(w->values), load_f32(w->values + 8)}; }
INLINE vf look_up(Table table, vu codes) {
    __m256i at = (__m256i)codes;
    __m256 low = _mm256_permutevar8x32_ps((__m256)table.low, at);
    __m256 high = _mm256_permutevar8x32_ps((__m256)table.high, at);
    return (vf)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28)); /* bit 3 decides */
}
#endif

/* Returns the numbers of nibble i (0 to 7) of 32-bit words. */
INLINE vf nibble_values(vu words, int i, int kind, Table table) {
    if (kind == TABLE4 || SIMD_WIDTH == 16) return look_up(table, words >> (4 * i)); /* a look-up is one instruction */
    return to_float((vi)(words << (28 - 4 * i)) >> 28);
}

INLINE vf byte_values(const uint8_t *codes, int kind) {
    return kind == INT8 ? to_float(widen_i8((const int8_t *)codes)) : load_e4m3(codes);
}

INLINE vf load_number(const Weight *w, const char *head, long column) {
    vf number = w->scale_bytes == 4 ? load_f32((const float *)head + column) : load_f16((const uint16_t *)head + column);
    return number * w->factor;
}

INLINE const char *group_at(const Weight *w, long panel, long group) {
    return w->panels + panel * code_panel_bytes(w) + group * group_bytes(w);
}
