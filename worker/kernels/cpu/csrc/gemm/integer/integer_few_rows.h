/* Multiplies a few rows of integers by a panel of codes, which go from memory to registers. */
#pragma once
#include "gemm/integer/integer_codes.h"

#if SIMD_WIDTH == 16
#define FEW_INTEGER_ROWS 4 /* more rows are faster with unpacked codes, which are loaded once for all of them */
#else
#define FEW_INTEGER_ROWS 2
#endif

typedef struct {
    vi of[FEW_INTEGER_ROWS][PANEL_REGISTERS];
} IntegerSums;

/* Multiplies by one block of 16 inputs. `kind` and `rows` are constants wherever this is inlined. */
INLINE void multiply_integer_block(const char *block, const int32_t *x, IntegerSums *sums, CodeTable table, int kind,
                                   const int rows) {
#pragma GCC unroll 2
    for (int octet = 0; octet < 2; octet++)
        for (int j = 0; j < PANEL_REGISTERS; j++) {
            vu pairs[4];
            read_pairs(block, octet, j * SIMD_WIDTH, table, kind, pairs);
            for (int p = 0; p < 4; p++)
                for (int r = 0; r < rows; r++)
                    sums->of[r][j] =
                        add_pairs(sums->of[r][j], pairs[p], (vu)broadcast_pair(x + (octet * 4 + p) * rows + r));
        }
}

/* Computes one panel: out [rows][32]. */
INLINE void few_integer_rows(const Weight *w, long panel, IntegerRows x, const float *input_sums, float *out, int kind,
                             const int rows) {
    CodeTable table = load_code_table(x.table);
    CodeReader reader = read_codes(w, panel, 0);
    vf total[FEW_INTEGER_ROWS][PANEL_REGISTERS] = {{{0}}};
    for (IntegerBlock b = block_at(w, 0, 0); b.from < w->k; b = block_after(w, b), x.scales += rows) {
        vf of_block[FEW_INTEGER_ROWS][PANEL_REGISTERS] = {{{0}}};
        for (long p = 0, k = 0; p < b.parts; p++, x.starts += rows) {
            IntegerSums sums;
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < PANEL_REGISTERS; j++) sums.of[r][j] = broadcast_pair(x.starts + r);
            for (long end = min_long(k + b.inputs, b.count); k < end; k += CODE_BLOCK, x.pairs += CODE_BLOCK / 2 * rows)
                multiply_integer_block(next_block(&reader), x.pairs, &sums, table, kind, rows);
            for (int j = 0; j < PANEL_REGISTERS; j++) {
                vf scale = load_scales(w, group_at(w, panel, b.group + p), j * SIMD_WIDTH);
                for (int r = 0; r < rows; r++)
                    of_block[r][j] = simd_fma(as_floats(sums.of[r][j]), scale, of_block[r][j]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < PANEL_REGISTERS; j++)
                total[r][j] = simd_fma(of_block[r][j], broadcast(x.scales[r]), total[r][j]);
        for (long i = 0; w->has_minimum && i < groups_ending(w, b); i++, input_sums += rows)
            for (int j = 0; j < PANEL_REGISTERS; j++) {
                vf minimum = load_minimums(w, group_at(w, panel, b.group + i), j * SIMD_WIDTH);
                for (int r = 0; r < rows; r++)
                    total[r][j] = simd_fma(broadcast(input_sums[r]), minimum, total[r][j]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_REGISTERS; j++) store_f32(out + r * PANEL + j * SIMD_WIDTH, total[r][j]);
}

typedef void FewIntegerRows(const Weight *w, long panel, IntegerRows x, const float *input_sums, float *out);

#define FEW_INTEGER_ROWS_KERNEL(name, kind, rows)                                                             \
    static void name##_##rows(const Weight *w, long panel, IntegerRows x, const float *sums, float *out) {    \
        few_integer_rows(w, panel, x, sums, out, kind, rows);                                                 \
    }
#define FEW_INTEGER_ROWS_KERNELS(rows)                       \
    FEW_INTEGER_ROWS_KERNEL(few_integer4, INTEGER4, rows)    \
    FEW_INTEGER_ROWS_KERNEL(few_integer8, INT8, rows)
FEW_INTEGER_ROWS_KERNELS(1)
FEW_INTEGER_ROWS_KERNELS(2)
#if SIMD_WIDTH == 16
FEW_INTEGER_ROWS_KERNELS(3)
FEW_INTEGER_ROWS_KERNELS(4)
#endif

/* The functions, by number of rows and then by whether codes have eight bits. */
static FewIntegerRows *const few_integer_rows_kernels[FEW_INTEGER_ROWS][2] = {
    {few_integer4_1, few_integer8_1},
    {few_integer4_2, few_integer8_2},
#if SIMD_WIDTH == 16
    {few_integer4_3, few_integer8_3},
    {few_integer4_4, few_integer8_4},
#endif
};
