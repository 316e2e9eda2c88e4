/* Runs all products of a call in one parallel region. A product is one weight of one job; a job whose columns have
 * several formats has several weights. Units of work are numbered over all products, so threads share many small
 * products in the same way as one large product.
 *
 * A kernel includes this file last. It must define these names before:
 *
 *     Layout                                                     how a thread keeps a block of rows
 *     CHUNK_BYTES                                                the most bytes of weights that are unpacked at once
 *     long block_rows(g)                                         the rows of a block
 *     size_t copied_bytes(g, rows)                               the size of ThreadBuffers.rows
 *     void load_rows(g, x, rows, buffers, layout)                prepares the block of rows x [rows, K]
 *     void multiply_panel(g, layout, buffers, row, rows, panel)  computes a unit of work: a panel for that block */
#include "buffers.h"
#include "work_sharing.h"
#include <omp.h>

#define MIN_PARALLEL_BYTES (96L << 10) /* with smaller weights, a second thread costs more than it saves */
#define MIN_PARALLEL_PRODUCTS (1L << 21)

/* Computes units of work until none is left. Returns 0, or 1 when memory for this thread's buffers is exhausted. */
static int multiply_units(const Gemm *products, WorkRange *ranges, int threads) {
    const Gemm *g = products, *loaded = NULL;
    ThreadBuffers *buffers = NULL;
    Results *results = thread_results();
    Layout layout = {0};
    long unit, loaded_row = 0; /* the first row of the block in the buffers, a block of the product `loaded` */
    results->count = 0; /* drops the results of a call that failed */
    while ((unit = take_unit(ranges, omp_get_thread_num(), threads)) >= 0) {
        while (unit < g->first_unit) g--;
        while (unit >= g->end_unit) g++;
        unit -= g->first_unit;
        long row = unit / g->panels * g->block_rows, rows = min_long(g->block_rows, g->t - row);
        if (g != loaded || row != loaded_row) {
            buffers = thread_buffers(g, rows, CHUNK_BYTES, copied_bytes(g, rows));
            if (!buffers) return 1;
            const char *x = ordered_rows(g, row, rows, buffers);
            if (input_sums_size(g, rows)) sum_inputs(g, x, rows, buffers->input_sums);
            load_rows(g, x, rows, buffers, &layout);
            loaded = g, loaded_row = row;
        }
        multiply_panel(g, &layout, buffers, row, rows, unit % g->panels);
    }
    write_results(results);
    return 0;
}

/* Writes the products of a job to `to`, and numbers their work units from `unit` on. Returns the number of products. */
static long plan_job(const GemmJob *job, int x_bf16, int out_bf16, long unit, Gemm *to) {
    long ldo = count_columns(job->weights), column = 0, count = 0;
    for (const Weight *w = job->weights; job->t && w; column += w->n, w = w->next) {
        Gemm *g = &to[count++];
        *g = (Gemm){w, job->x, job->out + column * (out_bf16 ? 2 : 4), job->t, w->n, w->k, ldo, x_bf16, out_bf16,
                    .panels = ceil_div(w->n, PANEL), .first_unit = unit};
        g->block_rows = block_rows(g);
        g->end_unit = unit += ceil_div(g->t, g->block_rows) * g->panels;
    }
    return count;
}

static int threads_for(const Gemm *products, long count, int threads) {
    long bytes = 0, multiplied = 0;
    for (const Gemm *g = products; g < products + count; g++) {
        bytes += g->n * g->k * (g->weight->kind == PLAIN && !g->x_bf16 ? 4 : 2);
        multiplied += g->t * g->n * g->k;
    }
    return bytes < MIN_PARALLEL_BYTES && multiplied < MIN_PARALLEL_PRODUCTS ? 1 : threads;
}

/* The function that every thread runs: multiply_units, or a function that calls it. */
typedef int Work(const Gemm *products, WorkRange *ranges, int threads);

/* Computes all jobs. Returns 0, or 1 when memory is exhausted. */
INLINE int multiply_jobs(const GemmJob *jobs, long job_count, int x_bf16, int out_bf16, int threads, Work *work) {
    long most = 0, count = 0;
    int failed = 0;
    for (long i = 0; i < job_count; i++)
        for (const Weight *w = jobs[i].weights; w; w = w->next) most++;
    Gemm *products = malloc(most * sizeof(Gemm));
    if (most && !products) return 1;
    for (long i = 0; i < job_count; i++)
        count += plan_job(&jobs[i], x_bf16, out_bf16, count ? products[count - 1].end_unit : 0, products + count);
    if (count) {
        threads = threads_for(products, count, threads);
        WorkRange ranges[threads];
        split_work(ranges, products[count - 1].end_unit, threads);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
        failed = work(products, ranges, threads);
    }
    free(products);
    return failed;
}

#define GEMM(dtype, is_bf16, work)                                                           \
    __attribute__((visibility("default"))) int JOIN(gemm_##dtype, SUFFIX)(                   \
        const GemmJob *jobs, long count, int out_bf16, int threads) {                        \
        return multiply_jobs(jobs, count, is_bf16, out_bf16, threads, work);                 \
    }
