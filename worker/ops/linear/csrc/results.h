/* Writes the results of a few rows for several panels together.
 *
 * A panel's results are one cache line or two in each row, and the lines of different rows are far apart. The weights
 * read since the last product have evicted these lines from the core's own caches. With 8 rows, writing line by line
 * while weights are read takes a tenth of the product's time. Writing longer pieces of each row takes only a third of
 * this tenth. */
#pragma once
#include "gemm.h"

#define MAX_KEPT_ROWS 32
#define MAX_KEPT_PANELS 16
#define MAX_KEPT_COLUMNS (MAX_KEPT_PANELS * PANEL)

/* The results of panels [panel, panel + count) of a product, which are not written yet. */
typedef struct {
    _Alignas(64) char kept[MAX_KEPT_ROWS * MAX_KEPT_COLUMNS * 4]; /* rows of MAX_KEPT_COLUMNS elements */
    const Gemm *product;
    long row, rows, panel, count;
} Results;

static Results *thread_results(void) {
    static _Thread_local Results results;
    return &results;
}

static void write_results(Results *results) {
    const Gemm *g = results->product;
    for (long r = 0; results->count && r < results->rows; r++) {
        long size = g->out_bf16 ? 2 : 4, columns = min_long(results->count * PANEL, g->n - results->panel * PANEL);
        memcpy(result_at(g, results->row + r, results->panel), results->kept + r * MAX_KEPT_COLUMNS * size,
               columns * size);
    }
    results->count = 0;
}

/* Stores a block of rows of one panel from an fp32 buffer with row length PANEL. The results of 2 to MAX_KEPT_ROWS rows
 * are kept, and a later call or write_results writes several panels together. A single row, or more than MAX_KEPT_ROWS
 * rows, are written immediately. With AVX2, results are always written immediately: multiplying takes longer there than
 * reading weights, so keeping results would gain nothing. */
static void keep_block(const Gemm *g, Results *results, const float *acc, long row, long rows, long panel) {
    if (SIMD_WIDTH == 8 || rows == 1 || rows > MAX_KEPT_ROWS) {
        store_block(g, acc, row, rows, panel);
        return;
    }
    long size = g->out_bf16 ? 2 : 4, count = results->count;
    if (results->product != g || results->row != row || results->panel + count != panel || count == MAX_KEPT_PANELS)
        write_results(results);
    if (!results->count) results->product = g, results->row = row, results->rows = rows, results->panel = panel;
    store_columns(g, acc, rows, panel, results->kept + results->count++ * PANEL * size, MAX_KEPT_COLUMNS * size);
}
