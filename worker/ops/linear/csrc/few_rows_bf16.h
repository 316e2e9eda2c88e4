/* Multiplies a few rows by a panel of codes without unpacking the panel to memory: codes are converted to bf16 pairs in
 * registers and multiplied there. Each element is the same chain of dot products as in gemm_bf16.c, so it has the same
 * bits.
 *
 * x is [K / 32][rows][32], padded with zeros. */
#pragma once
#include "unpack_bf16.h"

#define FEW_ROWS 4 /* for more rows, it is faster to unpack pairs of weights once for all rows */

/* The sums of every row: of[row][half of the panel's columns]. */
typedef struct {
    __m512 of[FEW_ROWS][2];
} Sums;

/* Adds the products of one block of 16 inputs. Callers pass constants for `kind` and `rows`. */
INLINE void multiply_block(const char *codes, const char *x, Sums *sums, __m512i table, int kind, const int rows) {
#pragma GCC unroll 8
    for (int pair = 0; pair < CODE_BLOCK / 2; pair++)
        for (int half = 0; half < 2; half++) {
            __m512bh numbers = (__m512bh)block_pairs(codes, half, pair, table, kind);
            for (int r = 0; r < rows; r++) {
                __m512i inputs = _mm512_set1_epi32(*(const int32_t *)(x + r * 64 + pair * 4));
                sums->of[r][half] = _mm512_dpbf16_ps(sums->of[r][half], (__m512bh)inputs, numbers);
            }
        }
}

/* Computes one panel: out [rows][32]. */
INLINE void few_rows_codes(const Weight *w, long panel, const char *x, const float *input_sums, float *out, int kind,
                           const int rows) {
    __m512i table = load_table_bf16(w, 1);
    CodeReader reader = read_codes(w, panel, 0);
    Sums total = {{{{0}}}};
    GroupEnd end = {w, group_at(w, panel, 0), input_sums};
    for (long k = 0; k < w->k; end.head += group_bytes(w), end.input_sums += rows) {
        Sums sums = {{{{0}}}};
        for (long group_end = min_long(k + w->group, w->k); k < group_end; k += CODE_BLOCK)
            multiply_block(next_block(&reader), x + k / 32 * rows * 64 + k % 32 * 2, &sums, table, kind, rows);
        for (int h = 0; h < 2; h++) {
            vf scale = load_scales(w, end.head, h * 16), minimum = broadcast(0);
            if (w->has_minimum) minimum = load_minimums(w, end.head, h * 16);
            for (int r = 0; r < rows; r++)
                total.of[r][h] =
                    (__m512)add_group((vf)total.of[r][h], (vf)sums.of[r][h], scale, minimum, &end, r);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) _mm512_store_ps(out + r * PANEL + h * 16, total.of[r][h]);
}

typedef void FewRows(const Weight *w, long panel, const char *x, const float *input_sums, float *out);

#define FEW_ROWS_KERNEL(name, kind, rows)                                                                         \
    static void few_##name##_##rows(const Weight *w, long panel, const char *x, const float *sums, float *out) {  \
        few_rows_codes(w, panel, x, sums, out, kind, rows);                                                       \
    }
#define FEW_ROWS_KERNELS(rows)            \
    FEW_ROWS_KERNEL(table4, TABLE4, rows) \
    FEW_ROWS_KERNEL(e4m3, E4M3, rows)
FEW_ROWS_KERNELS(1)
FEW_ROWS_KERNELS(2)
FEW_ROWS_KERNELS(3)
FEW_ROWS_KERNELS(4)

/* The functions, indexed by number of rows - 1 and by kind. NULL: no function is needed. Strips multiply PLAIN,
 * integer_few_rows.h multiplies the INTEGER kinds, and with bf16 inputs, INT8 codes are of kind INTEGER8. */
#define FEW_ROWS_ENTRY(rows) {NULL, few_table4_##rows, NULL, few_e4m3_##rows}
static FewRows *const few_rows_kernels[FEW_ROWS][4] = {
    FEW_ROWS_ENTRY(1), FEW_ROWS_ENTRY(2), FEW_ROWS_ENTRY(3), FEW_ROWS_ENTRY(4),
};
