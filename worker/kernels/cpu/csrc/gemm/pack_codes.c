/* Packs codes [n, k] with their scales and minimums in the order in which the matmuls read them (see weight.h).
 *
 * Kernels that multiply fp32 numbers read four-bit codes from 32-bit words, which hold 8 inputs of a column, lowest
 * first: [2 octets][32 columns]. Kernels that multiply pairs of bf16 read them from 16-bit words, which hold every other
 * of 8 inputs, so that neighbouring words give pairs: [2 halves][2 octets][16 columns][even inputs, odd inputs].
 * Eight-bit codes are bytes: [16 inputs][32 columns], or [2 halves][8 pairs][even inputs, odd inputs][16 columns]. */
#include "gemm/weight.h"
#include <immintrin.h>
#include <string.h>

typedef struct {
    long byte, shift; /* where a code is in its block */
} CodePlace;

static CodePlace place(long input, long column, int four_bits, int pairs) {
    long half = column / 16, pair = input / 2, parity = input % 2;
    if (four_bits && pairs) {
        long word = (half * 2 + pair / 4) * 32 + column % 16 * 2 + parity;
        return (CodePlace){word * 2 + pair % 4 / 2, pair % 2 * 4};
    }
    if (four_bits) return (CodePlace){(input / 8 * PANEL + column) * 4 + pair % 4, parity * 4};
    if (pairs) return (CodePlace){half * 256 + pair * 32 + parity * 16 + column % 16, 0};
    return (CodePlace){input * PANEL + column, 0};
}

static void pack_block(const Weight *w, const uint8_t *codes, char *to, long column, long input, int pairs) {
    memset(to, 0, code_block_bytes(w));
    for (long c = 0; c < PANEL && column + c < w->n; c++) {
        const uint8_t *row = codes + (column + c) * w->k;
        for (long i = 0; i < CODE_BLOCK && input + i < w->k; i++) {
            CodePlace p = place(i, c, has_four_bits(w), pairs);
            to[p.byte] |= row[input + i] << p.shift;
        }
    }
}

/* Stores one number per column, divided by the weight's factor (a power of two); zeros beyond the last column. */
__attribute__((target("f16c"))) static void pack_numbers(const Weight *w, const float *numbers, char *to, long column,
                                                         long group) {
    for (long c = 0; c < PANEL; c++) {
        float number = column + c < w->n ? numbers[(column + c) * group_count(w) + group] / w->factor : 0;
        if (w->scale_bytes == 4)
            ((float *)to)[c] = number;
        else
            ((uint16_t *)to)[c] = _cvtss_sh(number, 0);
    }
}

/* codes: [n, k] bytes; scale, minimum: [n, groups]; pairs: whether the kernel multiplies pairs of bf16 numbers. */
__attribute__((visibility("default"))) void pack_codes(const Weight *w, const uint8_t *codes, const float *scale,
                                                       const float *minimum, int pairs, int threads) {
    long panels = (w->n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < panels; p++)
        for (long g = 0; g < group_count(w); g++) {
            char *to = (char *)group_at(w, p, g);
            pack_numbers(w, scale, to, p * PANEL, g);
            if (w->has_minimum) pack_numbers(w, minimum, to + PANEL * w->scale_bytes, p * PANEL, g);
            to += group_head_bytes(w);
            for (long i = 0; i < w->group; i += CODE_BLOCK, to += code_block_bytes(w))
                pack_block(w, codes, to, p * PANEL, g * w->group + i, pairs);
        }
}
