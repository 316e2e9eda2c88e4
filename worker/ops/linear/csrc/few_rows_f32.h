/* Multiplies a few rows by a panel of codes without unpacking the panel to memory: codes are converted to fp32 in
 * registers and multiplied there. Each element is the same chain of multiply-adds as in gemm_simd.c, so it has the same
 * bits.
 *
 * x is [K / SIMD_WIDTH][rows][SIMD_WIDTH], padded with zeros to a multiple of CODE_BLOCK inputs. */
#pragma once
#include "unpack_f32.h"

#if SIMD_WIDTH == 16
#define FEW_ROWS 4 /* for more rows, it is faster to unpack numbers once for all rows */
#else
#define FEW_ROWS 2
#endif

/* The sums of every row and every column of a panel. */
typedef struct {
    vf of[FEW_ROWS][PANEL_REGISTERS];
} Sums;

/* Adds the products of one input of each row. numbers: the numbers of the weight for this input in all columns. */
INLINE void add_products(Sums *sums, const float *x, int input, const vf *numbers, const int rows) {
    const float *at = x + input / SIMD_WIDTH * rows * SIMD_WIDTH + input % SIMD_WIDTH;
    for (int r = 0; r < rows; r++) {
        vf number = broadcast(at[r * SIMD_WIDTH]);
        for (int j = 0; j < PANEL_REGISTERS; j++) sums->of[r][j] = simd_fma(number, numbers[j], sums->of[r][j]);
    }
}

/* Adds the products of one block of 16 inputs. Callers pass constants for `kind` and `rows`. */
INLINE void multiply_block(const char *block, const float *x, Sums *sums, Table table, int kind, const int rows) {
    vu words[PANEL_REGISTERS];
    vf numbers[PANEL_REGISTERS];
#pragma GCC unroll 16
    for (int i = 0; i < CODE_BLOCK; i++) {
        for (int j = 0; j < PANEL_REGISTERS; j++) {
            int column = j * SIMD_WIDTH;
            if (kind == INT8 || kind == E4M3) {
                const char *codes = block + i * PANEL + column;
                numbers[j] = kind == INT8 ? int8_values(codes) : e4m3_values(codes);
            } else {
                if (i % 8 == 0) words[j] = load_words(block + (i / 8 * PANEL + column) * 4);
                numbers[j] = nibble_values(words[j], i % 8, table);
            }
        }
        add_products(sums, x, i, numbers, rows);
    }
}

INLINE void store_sums(const Sums *sums, float *to, const int rows) {
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < PANEL_REGISTERS; j++) store_f32(to + r * PANEL + j * SIMD_WIDTH, sums->of[r][j]);
}

/* Computes one panel of codes: out [rows][32]. */
INLINE void few_rows_codes(const Weight *w, long panel, const float *x, const float *input_sums, float *out, int kind,
                           const int rows) {
    Table table = load_table(w);
    CodeReader reader = read_codes(w, panel, 0);
    Sums total = {{{{0}}}};
    GroupEnd end = {w, group_at(w, panel, 0), input_sums};
    for (long k = 0; k < w->k; end.head += group_bytes(w), end.input_sums += rows) {
        Sums sums = {{{{0}}}};
        for (long group_end = min_long(k + w->group, w->k); k < group_end; k += CODE_BLOCK)
            multiply_block(next_block(&reader), x + k * rows, &sums, table, kind, rows);
        for (int j = 0; j < PANEL_REGISTERS; j++) {
            vf scale = load_scales(w, end.head, j * SIMD_WIDTH), minimum = broadcast(0);
            if (w->has_minimum) minimum = load_minimums(w, end.head, j * SIMD_WIDTH);
            for (int r = 0; r < rows; r++)
                total.of[r][j] = add_group(total.of[r][j], sums.of[r][j], scale, minimum, &end, r);
        }
    }
    store_sums(&total, out, rows);
}

typedef void FewRows(const Weight *w, long panel, const float *x, const float *input_sums, float *out);

#define FEW_ROWS_KIND(name, kind, rows)                                                                             \
    static void few_##name##_##rows(const Weight *w, long panel, const float *x, const float *sums, float *out) {    \
        few_rows_codes(w, panel, x, sums, out, kind, rows);                                                          \
    }
#define FEW_ROWS_KERNELS(rows)            \
    FEW_ROWS_KIND(table4, TABLE4, rows)   \
    FEW_ROWS_KIND(int8, INT8, rows)       \
    FEW_ROWS_KIND(e4m3, E4M3, rows)
/* The functions for one number of rows, in the order of the kinds from TABLE4 on. */
#define FEW_ROWS_ENTRY(rows) {few_table4_##rows, few_int8_##rows, few_e4m3_##rows}

FEW_ROWS_KERNELS(1)
FEW_ROWS_KERNELS(2)
#if SIMD_WIDTH == 16
FEW_ROWS_KERNELS(3)
FEW_ROWS_KERNELS(4)
#endif

/* The functions, indexed by number of rows - 1 and by kind - TABLE4. */
static FewRows *const few_rows_kernels[FEW_ROWS][3] = {
    FEW_ROWS_ENTRY(1),
    FEW_ROWS_ENTRY(2),
#if SIMD_WIDTH == 16
    FEW_ROWS_ENTRY(3),
    FEW_ROWS_ENTRY(4),
#endif
};
