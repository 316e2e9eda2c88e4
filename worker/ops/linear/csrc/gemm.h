/* Definitions for all matmul kernels. They compute y[T, N] = x[T, K] times a packed weight, plus a bias.
 *
 * A unit of work is a block of rows times a panel of 32 columns (jobs.h). The division of work affects only speed: each
 * element is accumulated over K in a fixed order, whichever thread computes it. */
#pragma once
#include "weight.h"
#include "simd.h"
#include <stdlib.h>
#include <string.h>

#define PANEL_REGISTERS (PANEL / SIMD_WIDTH)

INLINE vu load_words(const char *p) {
    vu words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
}

/* The product of some rows and one weight. */
typedef struct {
    const Weight *weight;
    const char *x; /* [T, K] */
    char *out;     /* [T, N] in rows of ldo elements */
    long t, n, k, ldo;
    int x_bf16, out_bf16;
    long block_rows, panels, first_unit, end_unit; /* block_rows: rows of a block; for units of work, see jobs.h */
} Gemm;

/* Adds the bias to one row of results of a panel, and stores it. `columns` is PANEL except in the last panel. */
INLINE void store_row(const float *acc, const float *bias, char *out, long columns, int out_bf16) {
    for (long j = 0; j < columns; j += SIMD_WIDTH) {
        vf y = load_f32(acc + j);
        if (bias) y += load(bias, j, columns, 0);
        store(out, j, columns, y, out_bf16);
    }
}

/* Stores `rows` rows of one panel from an fp32 buffer with row length PANEL. out: the address of the first row's first
 * column; stride: bytes from row to row of `out`. */
INLINE void store_columns(const Gemm *g, const float *acc, long rows, long panel, char *out, long stride) {
    long column = panel * PANEL, columns = g->n - column < PANEL ? g->n - column : PANEL;
    const float *bias = g->weight->bias ? g->weight->bias + column : NULL;
    for (long r = 0; r < rows; r++, acc += PANEL, out += stride) {
        if (columns == PANEL && !bias && g->out_bf16)
            store_row(acc, NULL, out, PANEL, 1);
        else if (g->out_bf16)
            store_row(acc, bias, out, columns, 1);
        else
            store_row(acc, bias, out, columns, 0);
    }
}

/* Returns the address of the output element in this row and in the first column of this panel. */
INLINE char *result_at(const Gemm *g, long row, long panel) {
    return g->out + (row * g->ldo + panel * PANEL) * (g->out_bf16 ? 2 : 4);
}

/* Stores the results of a block of rows for one panel. */
INLINE void store_block(const Gemm *g, const float *acc, long row, long rows, long panel) {
    store_columns(g, acc, rows, panel, result_at(g, row, panel), g->ldo * (g->out_bf16 ? 2 : 4));
}

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

/* Returns the bytes of a row of inputs. */
INLINE long row_bytes(const Gemm *g) { return g->k * (g->x_bf16 ? 2 : 4); }

/* Divides t rows evenly into blocks of about `most` rows at most. Returns the number of rows of a block, which is a
 * multiple of `step`. The last block may have fewer rows. */
INLINE long even_blocks(long t, long most, long step) {
    return ceil_div(ceil_div(t, ceil_div(t, most)), step) * step;
}
