/* The buffers of a thread for its current block of rows. */
#pragma once
#include "groups.h"
#include "results.h"

typedef struct {
    char *chunk;                     /* unpacked weights */
    float *acc, *total, *input_sums; /* acc: sums over a group or over K; total: scaled sums of groups; input_sums: see
                                        sum_inputs */
    char *rows, *ordered;            /* rows: the inputs in the kernel's layout; ordered: the inputs permuted by
                                        weight->input_order */
    Results *results;
    size_t bytes;
} ThreadBuffers;

/* Returns this thread's buffers, or NULL when memory is exhausted. Later matmuls reuse them. chunk_bytes must be a
 * multiple of 64. acc and total have space for `rows` rounded up to a multiple of 32. */
static ThreadBuffers *thread_buffers(const Gemm *g, long rows, size_t chunk_bytes, size_t rows_bytes) {
    static _Thread_local ThreadBuffers buffers;
    size_t sums = ceil_div(rows, 32) * 32 * PANEL, inputs = input_sums_size(g, rows);
    size_t copied = ceil_div(rows_bytes, 64) * 64, ordered = g->weight->input_order ? rows * row_bytes(g) : 0;
    size_t bytes = chunk_bytes + (2 * sums + inputs) * sizeof(float) + copied + ceil_div(ordered, 64) * 64;
    if (bytes > buffers.bytes) {
        free(buffers.chunk);
        buffers.chunk = aligned_alloc(64, bytes);
        buffers.bytes = buffers.chunk ? bytes : 0;
        if (!buffers.chunk) return NULL;
    }
    buffers.results = thread_results();
    buffers.acc = (float *)(buffers.chunk + chunk_bytes);
    buffers.total = buffers.acc + sums;
    buffers.input_sums = buffers.total + sums;
    buffers.rows = (char *)(buffers.input_sums + inputs);
    buffers.ordered = buffers.rows + copied;
    return &buffers;
}

/* Returns rows [row, row + rows) of the inputs, permuted by weight->input_order. Without an order, returns g->x in
 * place. */
static const char *ordered_rows(const Gemm *g, long row, long rows, const ThreadBuffers *buffers) {
    const int64_t *order = g->weight->input_order;
    const char *x = g->x + row * row_bytes(g);
    if (!order) return x;
    for (long i = 0; i < rows; i++)
        for (long k = 0; k < g->k; k++)
            if (g->x_bf16)
                ((bf16 *)buffers->ordered)[i * g->k + k] = ((const bf16 *)x)[i * g->k + order[k]];
            else
                ((float *)buffers->ordered)[i * g->k + k] = ((const float *)x)[i * g->k + order[k]];
    return buffers->ordered;
}
