/* Packs codes [n, k] with their scales and minimums in the order in which the matmuls read them (see weight.h).
 *
 * Four-bit codes fill 32-bit words with one nibble per input, lowest first. For kernels that multiply fp32 numbers, a
 * word holds 8 consecutive inputs of a column: [2 octets][32 columns]. For kernels that multiply pairs of bf16, a word
 * holds every other input of 16, so that two neighbouring words give pairs: [32 columns][even inputs, odd inputs].
 * Eight-bit codes are bytes: [16 inputs][32 columns], or [2 halves][8 pairs][16 columns][2]. */
#include "gemm/weight.h"
#include <immintrin.h>
#include <string.h>

typedef struct {
    long word, shift; /* which 32-bit word (4-bit codes) or byte (8-bit codes) of a block; shift within the word */
} CodePlace;

static CodePlace place(long input, long column, int four_bits, int pairs) {
    if (four_bits && pairs) return (CodePlace){column * 2 + input % 2, input / 2 * 4};
    if (four_bits) return (CodePlace){input / 8 * PANEL + column, input % 8 * 4};
    if (pairs) return (CodePlace){column / 16 * 256 + input / 2 * 32 + column % 16 * 2 + input % 2, 0};
    return (CodePlace){input * PANEL + column, 0};
}

static void pack_block(const Weight *w, const uint8_t *codes, char *to, long column, long input, int pairs) {
    int four_bits = w->kind == INT4 || w->kind == TABLE4;
    memset(to, 0, code_block_bytes(w));
    for (long c = 0; c < PANEL && column + c < w->n; c++) {
        const uint8_t *row = codes + (column + c) * w->k;
        for (long i = 0; i < CODE_BLOCK && input + i < w->k; i++) {
            CodePlace p = place(i, c, four_bits, pairs);
            if (four_bits)
                ((uint32_t *)to)[p.word] |= (uint32_t)row[input + i] << p.shift;
            else
                to[p.word] = row[input + i];
        }
    }
}

/* Stores one number per column, divided by the weight's factor (a power of two); zeros beyond the last column. */
__attribute__((target("f16c"))) static void pack_numbers(const Weight *w, const float *numbers, char *to, long column,
                                                         long group, long groups) {
    for (long c = 0; c < PANEL; c++) {
        float number = column + c < w->n ? numbers[(column + c) * groups + group] / w->factor : 0;
        if (w->scale_bytes == 4)
            ((float *)to)[c] = number;
        else
            ((uint16_t *)to)[c] = _cvtss_sh(number, 0);
    }
}

/* codes: [n, k] bytes; scale, minimum: [n, groups]; pairs: whether the kernel multiplies pairs of bf16 numbers. */
__attribute__((visibility("default"))) void pack_codes(const Weight *w, const uint8_t *codes, const float *scale,
                                                       const float *minimum, char *panels, int pairs, int threads) {
    long groups = (w->k + w->group - 1) / w->group, count = (w->n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < count; p++)
        for (long g = 0; g < groups; g++) {
            char *to = panels + p * code_panel_bytes(w) + g * group_bytes(w);
            pack_numbers(w, scale, to, p * PANEL, g, groups);
            if (w->has_minimum) pack_numbers(w, minimum, to + PANEL * w->scale_bytes, p * PANEL, g, groups);
            to += group_head_bytes(w);
            for (long i = 0; i < w->group; i += CODE_BLOCK, to += code_block_bytes(w))
                pack_block(w, codes, to, p * PANEL, g * w->group + i, pairs);
        }
}
