/* Definitions shared by all matmul kernels, which compute y[T, N] = x[T, K] times a packed weight, plus a bias.
 *
 * Work is divided into blocks of rows times panels of 32 columns. The division affects speed only: every element is one
 * accumulation over K in one order, whichever thread computes it. */
#pragma once
#include "gemm/weight.h"
#include "simd.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define MIN_PARALLEL_BYTES (96L << 10) /* with smaller weights, a second thread costs more than it saves */

typedef struct {
    const char *x; /* [T, lda] */
    const Weight *weight;
    char *out;              /* [T, N] in rows of ldo */
    long t, n, k, lda, ldo; /* lda, ldo in elements */
    int x_bf16, out_bf16;
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
    const float *bias = g->weight->bias ? g->weight->bias + column : NULL;
    for (long r = 0; r < rows; r++, acc += PANEL) {
        char *out = g->out + ((row + r) * g->ldo + column) * size;
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

/* Returns a copy of x [t, k] whose inputs are in the order of the packed weight, or NULL when memory is exhausted. */
static char *ordered_inputs(const Gemm *g, int threads) {
    long size = g->x_bf16 ? 2 : 4;
    char *copy = aligned_alloc(64, ceil_div(max_long(g->t * g->k * size, 1), 64) * 64);
    if (!copy) return NULL;
    const int64_t *order = g->weight->input_order;
#pragma omp parallel for num_threads(threads) if (g->t > 1)
    for (long r = 0; r < g->t; r++)
        for (long i = 0; i < g->k; i++)
            if (size == 2)
                ((bf16 *)copy)[r * g->k + i] = ((const bf16 *)g->x)[r * g->k + order[i]];
            else
                ((float *)copy)[r * g->k + i] = ((const float *)g->x)[r * g->k + order[i]];
    return copy;
}

/* Multiplies by one weight. Returns 0, or 1 when memory is exhausted. */
typedef int Multiply(Gemm *g, int threads);

/* Multiplies by every weight of the list, whose products are next to each other. Returns 0, or 1 when memory is
 * exhausted. */
INLINE int multiply_all(const Weight *weights, const char *x, int x_bf16, char *out, long t, int out_bf16, int threads,
                        Multiply *multiply) {
    long ldo = 0;
    for (const Weight *w = weights; w; w = w->next) ldo += w->n;
    for (const Weight *w = weights; t && w; w = w->next) {
        Gemm g = {x, w, out, t, w->n, w->k, w->k, ldo, x_bf16, out_bf16};
        char *ordered = w->input_order ? ordered_inputs(&g, threads) : NULL;
        if (w->input_order && !ordered) return 1;
        if (ordered) g.x = ordered;
        int failed = multiply(&g, threads_for(&g, threads, w->kind == PLAIN && !x_bf16 ? 4 : 2));
        free(ordered);
        if (failed) return 1;
        out += w->n * (out_bf16 ? 2 : 4);
    }
    return 0;
}

#define GEMM(dtype, is_bf16, multiply)                                                                       \
    __attribute__((visibility("default"))) int JOIN(gemm_##dtype, SUFFIX)(                                   \
        const Weight *weights, const char *x, char *out, long t, int out_bf16, int threads) {                \
        return multiply_all(weights, x, is_bf16, out, t, out_bf16, threads, multiply);                       \
    }
