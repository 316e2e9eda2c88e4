/* Computes linears and adds the products of adapters to them. Rows without an adapter are not changed, because adding
 * zero would change the sign of a negative zero.
 *
 * If an adapter has many rows, its product with A runs in the linears' parallel region, because the linears read the
 * same inputs. All other products with A, and all products with B, run in a second region, which adds the products with
 * B to the outputs as soon as they are computed. With AMX tiles, the products with B of adapters with many rows run in
 * a region of their own, and one more region adds these products to the outputs. The products of a row, and so its
 * result, do not depend on other rows. worker/lora/loaded.py does the same computation in PyTorch. */
#include "adapters.h"
#include <stdlib.h>
#include <string.h>

#define MIN_PARALLEL_ELEMENTS 16384 /* with fewer elements, a second thread costs more time than it saves */
#define UNIT_COLUMNS 256            /* the most columns of B in a unit of work */
#define UNIT_ROWS 48                /* the most rows in a unit of work with B */

/* A unit of work of a thread: columns [from, to) of A for all rows, or columns [from, to) of a part for rows
 * [row, end). */
typedef struct {
    const Change *change;
    const ProductPart *part;
    long from, to, row, end;
} Unit;

/* The work of a call. The first `many` of `changes` are for adapters with many rows. AMX tiles compute the products
 * with B for the first `tiled`. */
typedef struct {
    const StepAdapters *step;
    Gemm *gemm;
    Change *changes;
    long changed, many, tiled;
    int is_bf16, threads;
    size_t size; /* bytes per element */
} Call;

static long min_long(long a, long b) { return a < b ? a : b; }

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

static void find_changes(Call *call, const GemmJob *jobs, long count) {
    const StepAdapters *s = call->step;
    for (int few = 0; few < 2; few++) {
        for (const AdapterRows *rows = s->adapters; rows < s->adapters + s->count; rows++) {
            if (!rows->count || (rows->count <= FEW_ROWS) != few) continue;
            for (const GemmJob *job = jobs; job < jobs + count; job++) {
                const Product *product = find_product(rows, job->weights);
                if (product) call->changes[call->changed++] = (Change){job, product, rows, NULL, NULL};
            }
        }
        if (!few) call->many = call->changed;
    }
    call->tiled = s->in_tiles ? call->many : 0;
}

static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

static char *take(char **room, size_t bytes) {
    char *taken = *room;
    *room += padded(bytes);
    return taken;
}

/* Returns the inputs of an adapter's rows: in place if the rows are neighbours, else a copy. */
static const char *gather(const Change *c, char **room, size_t size) {
    size_t bytes = c->job->weights->k * size;
    const int64_t *rows = c->rows->rows;
    long count = c->rows->count;
    if (rows[count - 1] - rows[0] == count - 1) return c->job->x + rows[0] * bytes;
    char *to = take(room, count * bytes);
    for (long i = 0; i < count; i++) memcpy(to + i * bytes, c->job->x + rows[i] * bytes, bytes);
    return to;
}

/* Returns the inputs [rows, b->k] of a part: the outputs of A that the part reads, padded with zeros. */
static const char *ranks_of_part(const Change *c, const ProductPart *part, char **room, size_t size) {
    size_t all = c->product->a->n * size, bytes = part->ranks * size, wide = part->b->k * size;
    if (all == wide && bytes == all) return c->low;
    char *to = take(room, c->rows->count * wide);
    for (long i = 0; i < c->rows->count; i++) {
        memcpy(to + i * wide, c->low + i * all + part->first_rank * size, bytes);
        memset(to + i * wide + bytes, 0, wide - bytes);
    }
    return to;
}

static size_t needed_bytes(const Call *call) {
    size_t bytes = 0;
    for (long i = 0; i < call->changed; i++) {
        const Change *c = &call->changes[i];
        long rows = c->rows->count;
        bytes += padded(rows * c->product->a->n * call->size);
        if (i >= call->many) continue;
        bytes += padded(rows * c->job->weights->k * call->size);
        if (i >= call->tiled) continue;
        for (const ProductPart *p = c->product->parts; p < c->product->parts + c->product->part_count; p++)
            bytes += padded(rows * p->b->k * call->size) + padded(rows * p->b->n * sizeof(float));
    }
    return bytes;
}

static void add_row(const Call *call, const Change *c, long i) {
    char *y = c->job->out + c->rows->rows[i] * count_columns(c->job->weights) * call->size;
    for (long p = 0; p < c->product->part_count; p++) {
        long column = c->product->parts[p].column, n = c->b[p].weights->n;
        call->step->add_product(y + column * call->size, (const float *)c->b[p].out + i * n,
                                c->product->factors + column, n, c->rows->scale);
    }
}

static void add_tiled(const Call *call) {
    long rows = 0, elements = 0;
    for (const Change *c = call->changes; c < call->changes + call->tiled; c++) {
        rows += c->rows->count;
        elements += c->rows->count * count_columns(c->job->weights);
    }
#pragma omp parallel for num_threads(call->threads) if (call->threads > 1 && elements >= MIN_PARALLEL_ELEMENTS)
    for (long row = 0; row < rows; row++) {
        const Change *c = call->changes;
        long i = row;
        for (; i >= c->rows->count; c++) i -= c->rows->count;
        add_row(call, c, i);
    }
}

/* Computes the products with B in AMX tiles, and adds them. jobs: space for the jobs of all parts */
static int multiply_tiled(const Call *call, char **room, GemmJob *jobs) {
    GemmJob *end = jobs;
    for (Change *c = call->changes; c < call->changes + call->tiled; c++) {
        c->b = end;
        for (const ProductPart *p = c->product->parts; p < c->product->parts + c->product->part_count; p++) {
            const char *ranks = ranks_of_part(c, p, room, call->size);
            *end++ = (GemmJob){p->b, ranks, take(room, c->rows->count * p->b->n * sizeof(float)), c->rows->count};
        }
    }
    if (call->gemm(jobs, end - jobs, 0, call->threads)) return 1;
    add_tiled(call);
    return 0;
}

static long count_units(long size, long of_unit) { return (size + of_unit - 1) / of_unit; }

static Unit *cut_a(Unit *to, const Change *c) {
    long columns = c->product->a->n;
    for (long from = 0; from < columns; from += PANEL)
        *to++ = (Unit){c, NULL, from, min_long(from + PANEL, columns), 0, c->rows->count};
    return to;
}

static Unit *cut_part(Unit *to, const Change *c, const ProductPart *part) {
    long rows = c->rows->count, blocks = count_units(rows, UNIT_ROWS);
    for (long i = 0; i < blocks; i++)
        for (long from = 0; from < part->b->n; from += UNIT_COLUMNS)
            *to++ = (Unit){c, part, from, min_long(from + UNIT_COLUMNS, part->b->n), i * rows / blocks,
                           (i + 1) * rows / blocks};
    return to;
}

/* Returns an upper bound on the number of units of work of a change. */
static long units_of(const Change *c) {
    long units = count_units(c->product->a->n, PANEL), blocks = count_units(c->rows->count, UNIT_ROWS);
    for (const ProductPart *p = c->product->parts; p < c->product->parts + c->product->part_count; p++)
        units += blocks * count_units(p->b->n, UNIT_COLUMNS);
    return units;
}

/* Multiplies by A for adapters with few rows, then by B unless tiles have done it, and adds the products. units: space
 * for all units of work */
static void multiply_narrow(const Call *call, Unit *units) {
    const Change *end = call->changes + call->changed;
    Unit *of_b = units, *last;
    for (const Change *c = call->changes + call->many; c < end; c++) of_b = cut_a(of_b, c);
    last = of_b;
    for (const Change *c = call->changes + call->tiled; c < end; c++)
        for (const ProductPart *p = c->product->parts; p < c->product->parts + c->product->part_count; p++)
            last = cut_part(last, c, p);
#pragma omp parallel num_threads(call->threads) if (call->threads > 1)
    {
        if (units < of_b) {
#pragma omp for schedule(dynamic)
            for (const Unit *u = units; u < of_b; u++) call->step->multiply_a(u->change, u->from, u->to);
        }
#pragma omp for schedule(dynamic)
        for (const Unit *u = of_b; u < last; u++)
            call->step->add_b(u->change, u->part, u->from, u->to, u->row, u->end);
    }
}

/* Returns 0, or 1 when memory is exhausted. jobs: space for the jobs of all linears, and of A and B for many rows */
static int multiply(const Call *call, const GemmJob *linears, long count, char *room, GemmJob *jobs, Unit *units) {
    memcpy(jobs, linears, count * sizeof(GemmJob));
    for (long i = 0; i < call->changed; i++) {
        Change *c = &call->changes[i];
        long rows = c->rows->count;
        c->low = take(&room, rows * c->product->a->n * call->size);
        if (i < call->many) jobs[count++] = (GemmJob){c->product->a, gather(c, &room, call->size), c->low, rows};
    }
    if (call->gemm(jobs, count, call->is_bf16, call->threads)) return 1;
    if (call->tiled && multiply_tiled(call, &room, jobs + count)) return 1;
    if (call->tiled < call->changed) multiply_narrow(call, units);
    return 0;
}

int multiply_with_adapters(const StepAdapters *s, Gemm *gemm, const GemmJob *jobs, long count, int is_bf16,
                           int threads) {
    Call call = {s, gemm, malloc(s->count * count * sizeof(Change)), 0, 0, 0, is_bf16, threads, is_bf16 ? 2 : 4};
    if (!call.changes) return 1;
    find_changes(&call, jobs, count);
    if (!call.changed) {
        free(call.changes);
        return gemm(jobs, count, is_bf16, threads);
    }
    long parts = 0, units = 0;
    for (const Change *c = call.changes; c < call.changes + call.changed; c++) {
        parts += c->product->part_count;
        units += units_of(c);
    }
    GemmJob *all_jobs = malloc((count + call.many + parts) * sizeof(GemmJob));
    Unit *all_units = malloc(units * sizeof(Unit));
    char *room = malloc(needed_bytes(&call));
    int failed = !all_jobs || !all_units || !room || multiply(&call, jobs, count, room, all_jobs, all_units);
    free(room);
    free(all_units);
    free(all_jobs);
    free(call.changes);
    return failed;
}
