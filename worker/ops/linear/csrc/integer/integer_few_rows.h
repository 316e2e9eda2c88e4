/* Multiplies a few rows of integers by a panel of codes, which are not unpacked to memory but read into registers. */
#pragma once
#include "integer_bytes.h"

/* How a few rows are multiplied: pairs of 4-bit codes with a table, pairs of 8-bit codes, or 4-bit and 6-bit codes byte
 * by byte (see multiplies_bytes). */
typedef enum { PAIRS4, PAIRS8, BYTES4, BYTES6 } FewWay;

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
INLINE int few_registers(FewWay way, int rows) {
    return SIMD_WIDTH == 16 && way >= BYTES4 && rows > 2 ? 1 : PANEL_REGISTERS;
}

/* Computes one panel: out [rows][32]. */
INLINE void few_integer_rows(const Weight *w, long panel, IntegerRows x, const float *input_sums, float *out,
                             FewWay way, const int rows) {
    const int registers = few_registers(way, rows);
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
                if (way >= BYTES4)
                    sum_bytes(&part, count, first * SIMD_WIDTH, x.pairs, x.starts, sum, way == BYTES6, rows, registers);
                else
                    sum_pairs(&part, count, first * SIMD_WIDTH, x.pairs, x.starts, table, sum,
                              way == PAIRS8 ? INTEGER8 : INTEGER4, rows, registers);
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

#define FEW_INTEGER_ROWS_KERNEL(name, way, rows)                                                              \
    static void name##_##rows(const Weight *w, long panel, IntegerRows x, const float *sums, float *out) {    \
        few_integer_rows(w, panel, x, sums, out, way, rows);                                                  \
    }
#define FEW_BYTES_KERNELS(rows)                          \
    FEW_INTEGER_ROWS_KERNEL(few_bytes4, BYTES4, rows)    \
    FEW_INTEGER_ROWS_KERNEL(few_bytes6, BYTES6, rows)
#define FEW_KERNELS(rows)                                \
    FEW_INTEGER_ROWS_KERNEL(few_pairs4, PAIRS4, rows)    \
    FEW_INTEGER_ROWS_KERNEL(few_pairs8, PAIRS8, rows)    \
    FEW_BYTES_KERNELS(rows)
FEW_KERNELS(1)
FEW_KERNELS(2)
#if FEW_INTEGER_ROWS == 4
FEW_KERNELS(3)
FEW_KERNELS(4)
#endif
#if FEW_BYTE_ROWS == 12
#define FOR_MORE_BYTE_ROWS(of) of(5) of(6) of(7) of(8) of(9) of(10) of(11) of(12)
FOR_MORE_BYTE_ROWS(FEW_BYTES_KERNELS)
#endif

/* The functions, indexed by number of rows - 1 and by FewWay. */
#define FEW_ENTRY(rows) {few_pairs4_##rows, few_pairs8_##rows, few_bytes4_##rows, few_bytes6_##rows},
#define FEW_BYTES_ENTRY(rows) {NULL, NULL, few_bytes4_##rows, few_bytes6_##rows},
static FewIntegerRows *const few_integer_rows_kernels[FEW_BYTE_ROWS][4] = {
    FEW_ENTRY(1) FEW_ENTRY(2)
#if FEW_INTEGER_ROWS == 4
    FEW_ENTRY(3) FEW_ENTRY(4)
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
    int kind = g->weight->kind;
    FewWay way = kind == INTEGER6 ? BYTES6 : multiplies_bytes(g, x.table) ? BYTES4 : kind == INTEGER8 ? PAIRS8 : PAIRS4;
    few_integer_rows_kernels[g->t - 1][way](g->weight, panel, x, buffers->input_sums, buffers->total);
}
