/* y[T, N] = x[T, K] times a packed weight, plus a bias: what is common to all kernels.
 *
 * The work is cut into pieces of some rows by some panels of 32 columns. How it is cut decides speed only: an element is
 * one accumulation over K in one order, whoever computes it. */
#pragma once
#include "simd.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 32                 /* columns of a packed panel */
#define SERIAL_BYTES (96L << 10) /* weights below which a second thread costs more than it brings */

typedef struct {
    const char *x;       /* [T, lda] */
    const char *weight;  /* panels */
    const float *bias;   /* [N] or NULL */
    char *out;           /* [T, N] */
    long t, n, k, lda;   /* lda in elements */
    int out_bf16;
} Gemm;

/* One row of results; `columns` is PANEL but in the last panel. */
INLINE void put_row(const float *acc, const float *bias, char *out, long columns, int out_bf16) {
    for (long j = 0; j < columns; j += LANES) {
        vf y = load_f32(acc + j);
        if (bias) y += load(bias, j, columns, 0);
        store(out, j, columns, y, out_bf16);
    }
}

/* Stores `rows` x `columns` of an fp32 tile buffer with row length PANEL. */
INLINE void put_block(const Gemm *g, const float *acc, long row, long rows, long panel) {
    long column = panel * PANEL, columns = g->n - column < PANEL ? g->n - column : PANEL, size = g->out_bf16 ? 2 : 4;
    const float *bias = g->bias ? g->bias + column : NULL;
    for (long r = 0; r < rows; r++, acc += PANEL) {
        char *out = g->out + ((row + r) * g->n + column) * size;
        if (columns == PANEL && !bias && g->out_bf16) put_row(acc, NULL, out, PANEL, 1);
        else if (g->out_bf16) put_row(acc, bias, out, columns, 1);
        else put_row(acc, bias, out, columns, 0);
    }
}

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long at_least(long a, long b) { return a > b ? a : b; }

INLINE int threads_for(const Gemm *g, int threads, long element) {
    return g->n * g->k * element < SERIAL_BYTES && g->t * g->n * g->k < (1L << 21) ? 1 : threads;
}
