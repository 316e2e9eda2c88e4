/* Multiplies a few rows of integers by a panel of codes, which are not unpacked to memory but read into registers. */
#pragma once
#include "integer_bytes.h"

enum { BYTES4 = INTEGER8 + 1 }; /* 4-bit codes from 0 to 15, multiplied byte by byte (see multiplies_bytes) */

/* Computes the same sums as sum_bytes, but multiplies pairs of 16-bit integers. Callers pass a constant `kind`. */
INLINE void sum_pairs(PartReader *part, long count, int column, const int32_t *x, const int32_t *starts,
                      CodeTable table, vi sum[][PANEL_REGISTERS], int kind, const int rows, const int registers) {
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sum[r][j] = broadcast_pair(starts + r);
    for (long i = 0; i < count; i++) {
        const char *block = block_of_part(part, i, column);
#pragma GCC unroll 2
        for (int octet = 0; octet < 2; octet++, x += 4 * rows)
            for (int j = 0; j < registers; j++) {
                vu pairs[4];
                read_pairs(block, octet, column + j * SIMD_WIDTH, table, kind, pairs);
                for (int p = 0; p < 4; p++)
                    for (int r = 0; r < rows; r++)
                        sum[r][j] = add_pairs(sum[r][j], pairs[p], (vu)broadcast_pair(x + p * rows + r));
            }
    }
}

/* Returns how many registers of columns are multiplied at once, so that all sums stay in registers. */
INLINE int few_registers(int kind, int rows) {
    return SIMD_WIDTH == 16 && kind == BYTES4 && rows > 2 ? 1 : PANEL_REGISTERS;
}

/* Computes one panel: out [rows][32]. */
INLINE void few_integer_rows(const Weight *w, long panel, IntegerRows x, const float *input_sums, float *out, int kind,
                             const int rows) {
    const int registers = few_registers(kind, rows);
    CodeTable table = load_code_table(x.table);
    PartReader part = {.codes = read_codes(w, panel, 0)};
    vf total[FEW_BYTE_ROWS][PANEL_REGISTERS] = {{{0}}};
    for (IntegerBlock b = block_at(w, 0, 0); b.from < w->k; b = block_after(w, b), x.scales += rows) {
        vf of_block[FEW_BYTE_ROWS][PANEL_REGISTERS] = {{{0}}};
        for (long p = 0, k = 0; p < b.parts; p++, x.starts += rows) {
            const char *head = group_at(w, panel, b.group + p);
            long count = min_long(b.inputs, b.count - k) / CODE_BLOCK;
            for (int first = 0; first < PANEL_REGISTERS; first += registers) {
                vi sum[FEW_BYTE_ROWS][PANEL_REGISTERS];
                if (kind == BYTES4)
                    sum_bytes(&part, count, first * SIMD_WIDTH, x.pairs, x.starts, sum, rows, registers);
                else
                    sum_pairs(&part, count, first * SIMD_WIDTH, x.pairs, x.starts, table, sum, kind, rows, registers);
                for (int j = 0; j < registers; j++) {
                    vf scale = load_scales(w, head, (first + j) * SIMD_WIDTH);
                    for (int r = 0; r < rows; r++)
                        of_block[r][first + j] = simd_fma(as_floats(sum[r][j]), scale, of_block[r][first + j]);
                }
            }
            k += count * CODE_BLOCK, x.pairs += count * CODE_BLOCK / 2 * rows;
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
#define FEW_PAIRS_KERNELS(rows)                              \
    FEW_INTEGER_ROWS_KERNEL(few_integer4, INTEGER4, rows)    \
    FEW_INTEGER_ROWS_KERNEL(few_integer8, INTEGER8, rows)    \
    FEW_INTEGER_ROWS_KERNEL(few_bytes4, BYTES4, rows)
FEW_PAIRS_KERNELS(1)
FEW_PAIRS_KERNELS(2)
#if FEW_INTEGER_ROWS == 4
FEW_PAIRS_KERNELS(3)
FEW_PAIRS_KERNELS(4)
#endif
#if FEW_BYTE_ROWS == 12
#define FOR_MORE_BYTE_ROWS(of) of(5) of(6) of(7) of(8) of(9) of(10) of(11) of(12)
#define FEW_BYTES_KERNEL(rows) FEW_INTEGER_ROWS_KERNEL(few_bytes4, BYTES4, rows)
FOR_MORE_BYTE_ROWS(FEW_BYTES_KERNEL)
#endif

/* The functions, indexed by number of rows - 1 and by kind of codes: 4 bits with a table, 8 bits, 4 bits without a
 * table. */
#define FEW_PAIRS_ENTRY(rows) {few_integer4_##rows, few_integer8_##rows, few_bytes4_##rows},
#define FEW_BYTES_ENTRY(rows) {NULL, NULL, few_bytes4_##rows},
static FewIntegerRows *const few_integer_rows_kernels[FEW_BYTE_ROWS][3] = {
    FEW_PAIRS_ENTRY(1) FEW_PAIRS_ENTRY(2)
#if FEW_INTEGER_ROWS == 4
    FEW_PAIRS_ENTRY(3) FEW_PAIRS_ENTRY(4)
#endif
#if FEW_BYTE_ROWS == 12
    FOR_MORE_BYTE_ROWS(FEW_BYTES_ENTRY)
#endif
};

/* Returns whether a product of integers has so few rows that its codes are not unpacked to memory. */
INLINE int has_few_integer_rows(const Gemm *g, const uint8_t *table) {
    return g->t <= FEW_INTEGER_ROWS || multiplies_bytes(g, table);
}

/* Computes one panel of a product with few rows (has_few_integer_rows): buffers->total [rows][32]. */
static void multiply_few_integer_rows(const Gemm *g, const ThreadBuffers *buffers, long panel) {
    IntegerRows x = integer_rows(g, buffers->rows, g->t);
    int codes = multiplies_bytes(g, x.table) ? 2 : g->weight->kind == INTEGER8;
    few_integer_rows_kernels[g->t - 1][codes](g->weight, panel, x, buffers->input_sums, buffers->total);
}
