/* Adds the products of adapters to linears. Rows without an adapter are not touched: adding zero to them would change
 * the sign of a negative zero.
 *
 * All A run in the parallel region of the linears themselves, whose inputs they read; all B run in a second region, and
 * a third one adds. Products of a row do not depend on other rows, so neither do the sums.
 * worker/adapters/operations.py says in PyTorch what is computed. */
#include "adapters.h"
#include <stdlib.h>
#include <string.h>

#define MIN_PARALLEL_ELEMENTS 16384 /* with fewer elements, a second thread costs more than it saves */

/* What an adapter adds to one job. b: the jobs of its parts, whose outputs are added */
typedef struct {
    const GemmJob *job;
    const Product *product;
    const AdapterRows *rows;
    const GemmJob *b;
} Change;

static const Product *find_product(const AdapterRows *rows, const Weight *changed) {
    long low = 0, high = rows->product_count;
    while (low < high) {
        long middle = (low + high) / 2;
        if (rows->products[middle].changed < changed)
            low = middle + 1;
        else
            high = middle;
    }
    return low < rows->product_count && rows->products[low].changed == changed ? &rows->products[low] : NULL;
}

static long find_changes(const StepAdapters *s, const GemmJob *jobs, long count, Change *changes) {
    long found = 0;
    for (const AdapterRows *rows = s->adapters; rows < s->adapters + s->count; rows++)
        for (const GemmJob *job = jobs; job < jobs + count; job++) {
            const Product *product = rows->count ? find_product(rows, job->weights) : NULL;
            if (product) changes[found++] = (Change){job, product, rows, NULL};
        }
    return found;
}

static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static char *take(char **room, size_t bytes) {
    char *taken = *room;
    *room += padded(bytes);
    return taken;
}

/* Returns the inputs of an adapter's rows, which are copied unless the rows are neighbours. */
static const char *gather(const Change *c, char **room, size_t size) {
    size_t bytes = c->job->weights->k * size;
    const int64_t *rows = c->rows->rows;
    long count = c->rows->count;
    if (rows[count - 1] - rows[0] == count - 1) return c->job->x + rows[0] * bytes;
    char *to = take(room, count * bytes);
    for (long i = 0; i < count; i++) memcpy(to + i * bytes, c->job->x + rows[i] * bytes, bytes);
    return to;
}

/* Returns [rows, b->k]: the outputs of A that a part reads, and zeros. low: all outputs of A. */
static const char *ranks_of_part(const Change *c, const ProductPart *part, const char *low, char **room, size_t size) {
    size_t all = c->product->a->n * size, bytes = part->ranks * size, wide = part->b->k * size;
    if (all == wide && bytes == all) return low;
    char *to = take(room, c->rows->count * wide);
    for (long i = 0; i < c->rows->count; i++) {
        memcpy(to + i * wide, low + i * all + part->first_rank * size, bytes);
        memset(to + i * wide + bytes, 0, wide - bytes);
    }
    return to;
}

static size_t needed_bytes(const Change *changes, long count, size_t size) {
    size_t bytes = 64;
    for (const Change *c = changes; c < changes + count; c++) {
        long rows = c->rows->count;
        bytes += padded(rows * c->job->weights->k * size) + padded(rows * c->product->a->n * size);
        for (long i = 0; i < c->product->part_count; i++) {
            const Weight *b = c->product->parts[i].b;
            bytes += padded(rows * b->k * size) + padded(rows * b->n * sizeof(float));
        }
    }
    return bytes;
}

static void add_row(const Change *c, AddProduct *add, long i, size_t size) {
    char *y = c->job->out + c->rows->rows[i] * count_columns(c->job->weights) * size;
    for (long p = 0; p < c->product->part_count; p++) {
        long column = c->product->parts[p].column, n = c->b[p].weights->n;
        add(y + column * size, (const float *)c->b[p].out + i * n, c->product->factors + column, n, c->rows->scale);
    }
}

static void add_products(const Change *changes, long count, AddProduct *add, size_t size, int threads) {
    long rows = 0, elements = 0;
    for (const Change *c = changes; c < changes + count; c++) {
        rows += c->rows->count;
        elements += c->rows->count * count_columns(c->job->weights);
    }
#pragma omp parallel for num_threads(threads) if (threads > 1 && elements >= MIN_PARALLEL_ELEMENTS)
    for (long row = 0; row < rows; row++) {
        const Change *c = changes;
        long i = row;
        for (; i >= c->rows->count; c++) i -= c->rows->count;
        add_row(c, add, i, size);
    }
}

/* to: space for the jobs of all linears and of all A; and, behind them, of all B. */
static int multiply(const StepAdapters *s, Gemm *gemm, const GemmJob *jobs, long count, Change *changes, long changed,
                    char *room, GemmJob *to, int is_bf16, int threads) {
    size_t size = is_bf16 ? 2 : 4;
    GemmJob *a = to + count, *b = a + changed, *end = b;
    memcpy(to, jobs, count * sizeof(GemmJob));
    for (long i = 0; i < changed; i++) {
        long rows = changes[i].rows->count;
        char *low = take(&room, rows * changes[i].product->a->n * size);
        a[i] = (GemmJob){changes[i].product->a, gather(&changes[i], &room, size), low, rows};
    }
    if (gemm(to, count + changed, is_bf16, threads)) return 1;
    for (long i = 0; i < changed; i++) {
        Change *c = &changes[i];
        c->b = end;
        for (const ProductPart *part = c->product->parts; part < c->product->parts + c->product->part_count; part++) {
            const char *ranks = ranks_of_part(c, part, a[i].out, &room, size);
            *end++ = (GemmJob){part->b, ranks, take(&room, c->rows->count * part->b->n * sizeof(float)), c->rows->count};
        }
    }
    if (gemm(b, end - b, 0, threads)) return 1;
    add_products(changes, changed, s->add, size, threads);
    return 0;
}

int multiply_with_adapters(const StepAdapters *s, Gemm *gemm, const GemmJob *jobs, long count, int is_bf16,
                           int threads) {
    Change *changes = malloc(s->count * count * sizeof(Change));
    if (!changes) return 1;
    long changed = find_changes(s, jobs, count, changes), all = count + changed;
    if (!changed) {
        free(changes);
        return gemm(jobs, count, is_bf16, threads);
    }
    for (long i = 0; i < changed; i++) all += changes[i].product->part_count;
    GemmJob *to = malloc(all * sizeof(GemmJob));
    char *room = malloc(needed_bytes(changes, changed, is_bf16 ? 2 : 4));
    int failed = !to || !room || multiply(s, gemm, jobs, count, changes, changed, room, to, is_bf16, threads);
    free(room);
    free(to);
    free(changes);
    return failed;
}
