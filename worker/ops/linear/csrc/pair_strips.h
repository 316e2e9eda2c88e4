/* Multiplies strips of rows by bf16 numbers, which are converted to fp32 in registers, anew for each strip. So memory
 * is read while a strip is computed, and no converted numbers are stored. Each element is the same chain of
 * multiply-adds as in gemm_simd.c, so it has the same bits. */
#pragma once
#include "strips.h"
#include "unpack_f32.h"
#include <limits.h>

#define PREFETCH_PAIRS 4096 /* how far ahead of use bf16 numbers are prefetched, in bytes */

#if SIMD_WIDTH == 16
#define MOST_PAIR_ROWS LONG_MAX
#else
#define MOST_PAIR_ROWS 8 /* with more rows, it is faster to unpack numbers once for all strips */
#endif

/* Multiplies a strip by `count` inputs, a multiple of SIMD_WIDTH, from input `from` on. x: [count / SIMD_WIDTH][rows]
 * [SIMD_WIDTH]; pairs: the panel's [K / 32][2][16 pairs of inputs][16 columns]; acc: [rows][32], for all of K. */
INLINE void multiply_pair_columns(const float *x, const char *pairs, long from, long count, float *acc, int column,
                                  const int rows, const int registers) {
    vf sum[MAX_STRIP_ROWS][PANEL_REGISTERS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++)
            sum[r][j] = from ? load_f32(acc + r * PANEL + column + j * SIMD_WIDTH) : broadcast(0);
    for (long k = from; k < from + count; k += SIMD_WIDTH, x += rows * SIMD_WIDTH)
        for (int i = 0; i < SIMD_WIDTH; i += 2) {
            const char *line = pairs + (k + i) / 32 * 2048 + (k + i) / 2 % 16 * 64;
            for (int odd = 0; odd < 2; odd++) { /* words are loaded twice, because registers are scarce */
                vf numbers[PANEL_REGISTERS];
                for (int j = 0; j < registers; j++) {
                    int at = column + j * SIMD_WIDTH;
                    const char *words = line + at / 16 * 1024 + at % 16 * 4;
                    if (!odd && at % 16 == 0) __builtin_prefetch(words + PREFETCH_PAIRS, 0, 3);
                    numbers[j] = odd ? odd_floats(load_words(words)) : even_floats(load_words(words));
                }
                for (int r = 0; r < rows; r++) {
                    vf input = broadcast(x[r * SIMD_WIDTH + i + odd]);
                    for (int j = 0; j < registers; j++) sum[r][j] = simd_fma(input, numbers[j], sum[r][j]);
                }
            }
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) store_f32(acc + r * PANEL + column + j * SIMD_WIDTH, sum[r][j]);
}

typedef void PairStrip(const float *x, const char *pairs, long from, long count, float *acc);

#define PAIR_STRIP(rows)                                                                                    \
    static void pair_strip_##rows(const float *x, const char *pairs, long from, long count, float *acc) {   \
        const int registers = registers_at_once(rows);                                                      \
        for (int j = 0; j < PANEL_REGISTERS; j += registers)                                                \
            multiply_pair_columns(x, pairs, from, count, acc, j * SIMD_WIDTH, rows, registers);             \
    }
FOR_STRIP_ROWS(PAIR_STRIP)

#define PAIR_STRIP_ENTRY(rows) pair_strip_##rows,
static PairStrip *const pair_strips[] = {FOR_STRIP_ROWS(PAIR_STRIP_ENTRY)};
