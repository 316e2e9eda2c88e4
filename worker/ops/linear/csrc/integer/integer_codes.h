/* Reads codes as 16-bit integers, in pairs of the inputs i and i + 4 of an octet (i = 0 to 3) for each column. */
#pragma once
#include "integer_rows.h"

/* A register that repeats IntegerRows.table in every 16 bytes. */
typedef vu CodeTable;

#if SIMD_WIDTH == 16
INLINE vu look_up(CodeTable table, vu bytes) { return (vu)_mm512_shuffle_epi8((__m512i)table, (__m512i)bytes); }
INLINE vu upper_bytes(vu pairs) { return (vu)_mm512_srli_epi16((__m512i)pairs, 8); }
INLINE vu sign_extended(const char *p) { return (vu)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
#else
INLINE vu look_up(CodeTable table, vu bytes) { return (vu)_mm256_shuffle_epi8((__m256i)table, (__m256i)bytes); }
INLINE vu upper_bytes(vu pairs) { return (vu)_mm256_srli_epi16((__m256i)pairs, 8); }
INLINE vu sign_extended(const char *p) { return (vu)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
#endif

/* Adds the products of pairs to `sum`. */
INLINE vi add_pairs(vi sum, vu a, vu b) {
#if SIMD_WIDTH == 16 && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif SIMD_WIDTH == 16
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

INLINE CodeTable load_code_table(const uint8_t *table) {
    __m128i integers = _mm_loadu_si128((const __m128i *)table);
#if SIMD_WIDTH == 16
    return (vu)_mm512_broadcast_i32x4(integers);
#else
    return (vu)_mm256_broadcastsi128_si256(integers);
#endif
}

/* Reads the codes of one octet of a block for a register of columns from `column` on, a byte each: its even inputs, then
 * its odd inputs. Codes have 4 bits or, with `six_bits`, 6 bits. Callers pass a constant `six_bits`. */
INLINE void read_octet(const char *block, int octet, int column, int six_bits, vu *bytes) {
    vu words = load_words(block + (octet * PANEL + column) * 4);
    bytes[0] = words & 0x0f0f0f0fu, bytes[1] = (words >> 4) & 0x0f0f0f0fu;
    if (!six_bits) return;
    vu upper = load_words(block + (2 * PANEL + column) * 4);
    bytes[0] |= (octet ? upper : upper << 4) & 0x30303030u;
    bytes[1] |= (octet ? upper >> 2 : upper << 2) & 0x30303030u;
}

/* Reads the four pairs of an octet of inputs, for a register of columns from `column` on. Callers pass a constant
 * `kind`. */
INLINE void read_pairs(const char *block, int octet, int column, CodeTable table, int kind, vu *pairs) {
    if (kind == INTEGER8) {
        for (int p = 0; p < 4; p++) pairs[p] = sign_extended(block + ((octet * 4 + p) * PANEL + column) * 2);
        return;
    }
    vu bytes[2];
    read_octet(block, octet, column, kind == INTEGER6, bytes);
    if (kind == INTEGER4) bytes[0] = look_up(table, bytes[0]), bytes[1] = look_up(table, bytes[1]);
    pairs[0] = bytes[0] & 0x00ff00ffu, pairs[1] = bytes[1] & 0x00ff00ffu;
    pairs[2] = upper_bytes(bytes[0]), pairs[3] = upper_bytes(bytes[1]);
}

INLINE vi broadcast_pair(const int32_t *pair) { return *pair - (vi){0}; }
INLINE vf as_floats(vi x) {
#if SIMD_WIDTH == 16
    return (vf)_mm512_cvtepi32_ps((__m512i)x);
#else
    return (vf)_mm256_cvtepi32_ps((__m256i)x);
#endif
}
