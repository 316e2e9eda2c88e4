/* Definitions shared by all matmul kernels, which compute y[T, N] = x[T, K] times a packed weight, plus a bias.
 *
 * Work is divided into blocks of rows times panels of 32 columns. The division affects speed only: every element is one
 * accumulation over K in one order, whichever thread computes it. */
#pragma once
#include "simd.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 32                       /* columns of a packed panel */
#define MIN_PARALLEL_BYTES (96L << 10) /* with smaller weights, a second thread costs more than it saves */

typedef struct {
    const char *x;      /* [T, lda] */
    const char *weight; /* panels */
    const float *bias;  /* [N] or NULL */
    char *out;          /* [T, N] */
    long t, n, k, lda;  /* lda in elements */
    int out_bf16;
} Gemm;

/* Stores one row of results. `columns` is PANEL except in the last panel. */
INLINE void store_row(const float *acc, const float *bias, char *out, long columns, int out_bf16) {
    for (long j = 0; j < columns; j += SIMD_WIDTH) {
        vf y = load_f32(acc + j);
        if (bias) y += load(bias, j, columns, 0);
        store(out, j, columns, y, out_bf16);
    }
}

/* Stores a block of `rows` rows of one panel from an fp32 buffer with row length PANEL. */
INLINE void store_block(const Gemm *g, const float *acc, long row, long rows, long panel) {
    long column = panel * PANEL, columns = g->n - column < PANEL ? g->n - column : PANEL, size = g->out_bf16 ? 2 : 4;
    const float *bias = g->bias ? g->bias + column : NULL;
    for (long r = 0; r < rows; r++, acc += PANEL) {
        char *out = g->out + ((row + r) * g->n + column) * size;
        if (columns == PANEL && !bias && g->out_bf16)
            store_row(acc, NULL, out, PANEL, 1);
        else if (g->out_bf16)
            store_row(acc, bias, out, columns, 1);
        else
            store_row(acc, bias, out, columns, 0);
    }
}

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

INLINE int threads_for(const Gemm *g, int threads, long element) {
    return g->n * g->k * element < MIN_PARALLEL_BYTES && g->t * g->n * g->k < (1L << 21) ? 1 : threads;
}
