/* Unpacks a panel's codes to pairs of bf16, for the kernels that multiply bf16. A k-step has 32 inputs:
 * [2 halves][16 pairs][16 columns][2]. */
#pragma once
#include "groups.h"

#define K_STEP_BYTES 2048 /* one k-step of a panel of bf16 pairs */

/* Reads e4m3 as fp16, which makes the values 2^8 times too small; linear/native.py corrects this. */
INLINE __m512 e4m3_values(const char *p) {
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16((short)0x8000));
    __m256i rest = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    return _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}

INLINE __m512 int8_values(const char *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* Returns the table of the 16 values of 4-bit codes, times `factor`, as bf16. The table is repeated, because a look-up
 * uses five bits, and the fifth belongs to another code. */
INLINE __m512i load_table_bf16(const Weight *w, float factor) {
    __m256i once = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(w->values), _mm512_set1_ps(factor)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
}

/* Returns pairs of the values of even and odd inputs, which bf16 holds exactly. */
INLINE __m512i pairs_of(__m512 even, __m512 odd) {
    return _mm512_or_si512(_mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
}

/* Returns the pairs of numbers of two inputs, for 16 columns of a block. The inputs are neighbours, or inputs i and i +
 * 4 of an octet if codes are in the order for integers. Callers pass a constant `kind`. */
INLINE __m512i block_pairs(const char *codes, int half, int pair, __m512i table, int kind) {
    if (kind == TABLE4 || kind == INTEGER4) {
        __m512i words = _mm512_loadu_si512(codes + (kind == TABLE4 ? half * 2 + pair / 4 : pair / 4 * 2 + half) * 64);
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, pair % 4 * 4), table);
    }
    if (kind == INTEGER8) {
        __m512i numbers = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(codes + (pair * PANEL + half * 16) * 2)));
        __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(numbers, 16), 16));
        return pairs_of(even, _mm512_cvtepi32_ps(_mm512_srai_epi32(numbers, 16)));
    }
    const char *even = codes + half * 256 + pair * 32;
    return kind == INT8 ? pairs_of(int8_values(even), int8_values(even + 16))
                        : pairs_of(e4m3_values(even), e4m3_values(even + 16));
}

/* Unpacks one block of 16 inputs. */
INLINE void unpack_block_bf16(const char *codes, char *to, __m512i table, int kind) {
    for (int half = 0; half < 2; half++, to += K_STEP_BYTES / 2)
        for (int pair = 0; pair < CODE_BLOCK / 2; pair++)
            _mm512_store_si512(to + pair * 64, block_pairs(codes, half, pair, table, kind));
}

/* Unpacks `steps` k-steps. With `spread`, each block of 16 inputs gets a k-step of its own, whose other half is zero.
 * This serves groups of 16 inputs, because AMX tiles hold 32 inputs. */
INLINE void unpack_codes_bf16(const Weight *w, long panel, long step, long steps, char *to, int spread, int kind) {
    __m512i table = load_table_bf16(w, kind == INTEGER4 ? 1 / integer_unit(w) : 1);
    CodeReader reader = read_codes(w, panel, step * 32);
    for (long k = step * 32; k < (step + steps) * 32; k += CODE_BLOCK) {
        long half = k % 32 / 16, at = spread ? k / 16 - step * 2 : k / 32 - step;
        char *block = to + at * K_STEP_BYTES + half * 512;
        int there = k < group_count(w) * w->group; /* 0 after the last group, which may end within a k-step */
        if (there) unpack_block_bf16(next_block(&reader), block, table, kind);
        for (int columns = 0; columns < 2; columns++) {
            if (!there) memset(block + columns * K_STEP_BYTES / 2, 0, 512);
            if (spread) memset(to + at * K_STEP_BYTES + (1 - half) * 512 + columns * K_STEP_BYTES / 2, 0, 512);
        }
    }
}

/* Returns the bf16 pairs of `steps` k-steps of a panel. Plain panels are used in place. Codes are unpacked to `buffer`
 * (see unpack_codes_bf16). */
static const char *panel_pairs(const Weight *w, long panel, long step, long steps, char *buffer, int spread) {
    switch (w->kind) {
        case INTEGER4: unpack_codes_bf16(w, panel, step, steps, buffer, spread, INTEGER4); return buffer;
        case INTEGER8: unpack_codes_bf16(w, panel, step, steps, buffer, spread, INTEGER8); return buffer;
        case TABLE4: unpack_codes_bf16(w, panel, step, steps, buffer, spread, TABLE4); return buffer;
        case INT8: unpack_codes_bf16(w, panel, step, steps, buffer, spread, INT8); return buffer;
        case E4M3: unpack_codes_bf16(w, panel, step, steps, buffer, spread, E4M3); return buffer;
    }
    return w->panels + (panel * ceil_div(w->k, 32) + step) * K_STEP_BYTES;
}
