/* Multiplies a few rows of integers by a panel of codes, which go from memory to registers. */
#pragma once
#include "gemm/integer/integer_bytes.h"

enum { BYTES4 = INTEGER8 + 1 }; /* four-bit codes from 0 to 15, which are multiplied byte by byte; see multiplies_bytes */

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
            IntegerSums sums = {{{{0}}}, {{{0}}}};
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < PANEL_REGISTERS; j++) sums.of[r][j] = broadcast_pair(x.starts + r);
            for (long end = min_long(k + b.inputs, b.count); k < end; k += CODE_BLOCK, x.pairs += CODE_BLOCK / 2 * rows)
                if (kind == BYTES4)
                    multiply_bytes(next_block(&reader), x.pairs, &sums, rows);
                else
                    multiply_integer_block(next_block(&reader), x.pairs, &sums, table, kind, rows);
            for (int j = 0; j < PANEL_REGISTERS; j++) {
                vf scale = load_scales(w, group_at(w, panel, b.group + p), j * SIMD_WIDTH);
                for (int r = 0; r < rows; r++)
                    of_block[r][j] = simd_fma(as_floats(sums.of[r][j] + (sums.upper[r][j] << 8)), scale, of_block[r][j]);
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
    FEW_INTEGER_ROWS_KERNEL(few_integer8, INTEGER8, rows)    \
    FEW_INTEGER_ROWS_KERNEL(few_bytes4, BYTES4, rows)
FEW_INTEGER_ROWS_KERNELS(1)
FEW_INTEGER_ROWS_KERNELS(2)
#if SIMD_WIDTH == 16
FEW_INTEGER_ROWS_KERNELS(3)
FEW_INTEGER_ROWS_KERNELS(4)
#endif

/* The functions, by number of rows and then by codes: four bits with a table, eight bits, four bits as they are. */
#define FEW_INTEGER_ROWS_ENTRY(rows) {few_integer4_##rows, few_integer8_##rows, few_bytes4_##rows},
static FewIntegerRows *const few_integer_rows_kernels[FEW_INTEGER_ROWS][3] = {
    FEW_INTEGER_ROWS_ENTRY(1) FEW_INTEGER_ROWS_ENTRY(2)
#if SIMD_WIDTH == 16
    FEW_INTEGER_ROWS_ENTRY(3) FEW_INTEGER_ROWS_ENTRY(4)
#endif
};

/* Computes one panel for up to FEW_INTEGER_ROWS rows: buffers->total [rows][32]. */
static void multiply_few_integer_rows(const Gemm *g, const ThreadBuffers *buffers, long panel) {
    IntegerRows x = integer_rows(g, buffers->rows, g->t);
    int codes = multiplies_bytes(g, x.table) ? 2 : g->weight->kind == INTEGER8;
    few_integer_rows_kernels[g->t - 1][codes](g->weight, panel, x, buffers->input_sums, buffers->total);
}
