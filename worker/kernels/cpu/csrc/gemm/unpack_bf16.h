/* Unpacks a panel's numbers to bf16 pairs, for kernels that multiply those: k-steps of 32 inputs, each
 * [2 halves][16 pairs][16 columns][2]. */
#pragma once
#include "gemm/unpack.h"

#define K_STEP_BYTES 2048   /* one k-step of a panel of bf16 pairs */
#define PREFETCH_CODES 4096 /* how far ahead of use codes are prefetched, in bytes */

/* Each column's number fills two neighbouring lanes: those of an even and of an odd input. */
INLINE void load_group_bf16(const Weight *w, const char *head, GroupNumbers *to) {
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (long c = 0; c < PANEL; c += 16) {
        __m512 scale = (__m512)load_number(w, head, c), minimum = _mm512_setzero_ps();
        if (w->has_minimum) minimum = (__m512)load_number(w, head + PANEL * w->scale_bytes, c);
        _mm512_store_ps(to->scale + 2 * c, _mm512_permutexvar_ps(low, scale));
        _mm512_store_ps(to->scale + 2 * c + 16, _mm512_permutexvar_ps(high, scale));
        _mm512_storeu_ps(to->minimum + 2 * c, _mm512_permutexvar_ps(low, minimum));
        _mm512_storeu_ps(to->minimum + 2 * c + 16, _mm512_permutexvar_ps(high, minimum));
    }
}

/* Stores the pairs of 16 columns, given the numbers of the first and of the last 8. */
INLINE void store_pairs(char *to, vf first, vf last, const GroupNumbers *group, int half, int has_minimum) {
    const float *scale = group->scale + half * 32, *minimum = group->minimum + half * 32;
    first = has_minimum ? first * load_f32(scale) + load_f32(minimum) : first * load_f32(scale);
    last = has_minimum ? last * load_f32(scale + 16) + load_f32(minimum + 16) : last * load_f32(scale + 16);
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)last, (__m512)first));
}

/* Unpacks one block of 16 inputs. */
INLINE void unpack_block_bf16(const char *codes, const GroupNumbers *group, char *to, Table table, int kind,
                              int has_minimum) {
    for (int half = 0; half < 2; half++, to += K_STEP_BYTES / 2) {
        vu words[2];
        if (kind == INT4 || kind == TABLE4) __builtin_memcpy(words, codes + half * 128, sizeof words);
        for (int i = 0; i < CODE_BLOCK / 2; i++) {
            vf first, last;
            if (kind == INT4 || kind == TABLE4) {
                first = nibble_values(words[0], i, kind, table), last = nibble_values(words[1], i, kind, table);
            } else {
                const uint8_t *bytes = (const uint8_t *)codes + half * 256 + i * 32;
                first = byte_values(bytes, kind), last = byte_values(bytes + 16, kind);
            }
            store_pairs(to + i * 64, first, last, group, half, has_minimum);
        }
    }
}

INLINE void unpack_codes_bf16(const Weight *w, long panel, long step, long steps, char *to, int kind, int has_minimum) {
    Table table = load_table(w);
    GroupNumbers numbers;
    long group = -1, block_bytes = code_block_bytes(w);
    for (long k = step * 32; k < (step + steps) * 32; k += CODE_BLOCK) {
        char *at = to + (k / 32 - step) * K_STEP_BYTES + k % 32 / 16 * 512;
        if (k >= ceil_div(w->k, CODE_BLOCK) * CODE_BLOCK) { /* the step's second half is beyond the last group */
            for (int half = 0; half < 2; half++) memset(at + half * K_STEP_BYTES / 2, 0, 512);
            continue;
        }
        const char *head = group_at(w, panel, k / w->group);
        if (k / w->group != group) load_group_bf16(w, head, &numbers);
        group = k / w->group;
        const char *codes = head + group_head_bytes(w) + (k - group * w->group) / CODE_BLOCK * block_bytes;
        for (long i = 0; i < block_bytes; i += 64) __builtin_prefetch(codes + PREFETCH_CODES + i, 0, 3);
        unpack_block_bf16(codes, &numbers, at, table, kind, has_minimum);
    }
}

#define UNPACK_KIND(kind)                                                  \
    case kind:                                                             \
        if (w->has_minimum)                                                \
            unpack_codes_bf16(w, panel, step, steps, buffer, kind, 1);     \
        else                                                               \
            unpack_codes_bf16(w, panel, step, steps, buffer, kind, 0);     \
        return buffer;

/* Returns the pairs of `steps` k-steps of a panel: in place, or unpacked to `buffer`. */
static const char *bf16_steps(const Weight *w, long panel, long step, long steps, char *buffer) {
    switch (w->kind) {
        UNPACK_KIND(INT4)
        UNPACK_KIND(TABLE4)
        UNPACK_KIND(INT8)
        UNPACK_KIND(E4M3)
    }
    return w->panels + (panel * ceil_div(w->k, 32) + step) * K_STEP_BYTES;
}
