/* Unpacks a panel's numbers [inputs][32 columns] to fp32, for kernels that multiply in fp32. */
#pragma once
#include "groups.h"

#if SIMD_WIDTH == 16
INLINE vf int8_values(const char *p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* Reads e4m3 as fp16, which makes the values 2^8 times too small; linear/native.py corrects this. */
INLINE vf e4m3_values(const char *p) {
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16((short)0x8000));
    __m256i rest = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    return (vf)_mm512_cvtph_ps(_mm256_or_si256(sign, rest));
}
typedef vf Table;
INLINE Table load_table(const Weight *w) { return load_f32(w->values); }
/* Returns the values of nibble i of 32-bit words. */
INLINE vf nibble_values(vu words, int i, Table table) {
    return (vf)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), (__m512)table);
}
#else
INLINE vf int8_values(const char *p) {
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* Reads e4m3 as fp16, which makes the values 2^8 times too small; linear/native.py corrects this. */
INLINE vf e4m3_values(const char *p) {
    __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16((short)0x8000));
    __m128i rest = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
    return (vf)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
}
typedef struct {
    vf low, high; /* low: the numbers of codes 0 to 7; high: the numbers of codes 8 to 15 */
} Table;
INLINE Table load_table(const Weight *w) { return (Table){load_f32(w->values), load_f32(w->values + 8)}; }
/* Returns the values of nibble i of 32-bit words. */
INLINE vf nibble_values(vu words, int i, Table table) {
    __m256i at = (__m256i)(words >> (4 * i));
    __m256 low = _mm256_permutevar8x32_ps((__m256)table.low, at);
    __m256 high = _mm256_permutevar8x32_ps((__m256)table.high, at);
    return (vf)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28)); /* bit 3 selects low or high */
}
#endif

/* Unpacks one block of 16 inputs. Callers pass a constant `kind`. */
INLINE void unpack_block_f32(const char *codes, float *to, Table table, int kind) {
    if (kind == INT8 || kind == E4M3) {
        for (int i = 0; i < CODE_BLOCK * PANEL; i += SIMD_WIDTH)
            store_f32(to + i, kind == INT8 ? int8_values(codes + i) : e4m3_values(codes + i));
        return;
    }
    for (int octet = 0; octet < 2; octet++, to += 8 * PANEL)
        for (int c = 0; c < PANEL; c += SIMD_WIDTH) {
            vu words = load_words(codes + (octet * PANEL + c) * 4);
            for (int i = 0; i < 8; i++) store_f32(to + i * PANEL + c, nibble_values(words, i, table));
        }
}

/* Unpacks the codes of `count` inputs from input `from` on. `from` is a multiple of CODE_BLOCK. */
INLINE void unpack_codes_f32(const Weight *w, long panel, long from, long count, float *to, int kind) {
    Table table = load_table(w);
    CodeReader reader = read_codes(w, panel, from);
    for (long k = from; k < from + count; k += CODE_BLOCK, to += CODE_BLOCK * PANEL)
        unpack_block_f32(next_block(&reader), to, table, kind);
}

INLINE vf even_floats(vu pairs) { return as_float(pairs << 16); }
INLINE vf odd_floats(vu pairs) { return as_float(pairs & 0xffff0000u); }

/* Returns the bf16 pairs of a panel from input k on. k is a multiple of 32. */
INLINE const char *pairs_at(const Weight *w, long panel, long k) {
    return w->panels + (panel * ceil_div(w->k, 32) + k / 32) * 2048;
}

/* Unpacks bf16 pairs, which were prefetched during the products of the previous chunk. `from` is a multiple of 32. */
INLINE void unpack_pairs_f32(const Weight *w, long panel, long from, long count, float *to) {
    const char *chunk = pairs_at(w, panel, from);
    for (long i = 0; i < (count + 1) / 2; i++, to += 2 * PANEL) {
        const char *pairs = chunk + i / 16 * 2048 + i % 16 * 64;
        for (int c = 0; c < PANEL; c += SIMD_WIDTH) {
            vu words = load_words(pairs + c / 16 * 1024 + c % 16 * 4);
            store_f32(to + c, even_floats(words));
            store_f32(to + PANEL + c, odd_floats(words));
        }
    }
}

/* Returns the fp32 numbers [count][32] of a chunk of a panel: in place if they are fp32, else unpacked to `buffer`. */
static const float *panel_numbers(const Gemm *g, long panel, long from, long count, float *buffer) {
    const Weight *w = g->weight;
    switch (w->kind) {
        case TABLE4: unpack_codes_f32(w, panel, from, count, buffer, TABLE4); return buffer;
        case INT8: unpack_codes_f32(w, panel, from, count, buffer, INT8); return buffer;
        case E4M3: unpack_codes_f32(w, panel, from, count, buffer, E4M3); return buffer;
    }
    if (!g->x_bf16) return (const float *)w->panels + (panel * g->k + from) * PANEL;
    unpack_pairs_f32(w, panel, from, count, buffer);
    return buffer;
}
