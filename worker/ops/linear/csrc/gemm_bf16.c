/* bf16 matmul. Codes that stand for small integers are multiplied as integers (integer_strips.h). All other weights are
 * multiplied by vdpbf16ps, which adds the products of two neighbouring k to each fp32 element. Panels of plain weights
 * have the same layout as for AMX: [N/32][K/32][2 halves][16 pairs][16 columns][2].
 *
 * Every element is one chain over the pairs of k in order. The accumulators of a strip of up to 12 rows x 32 columns
 * stay in registers. A single strip goes through all of K at once. With several strips, K is cut into chunks whose
 * weights fit in the L2 cache, and all strips use a chunk before the next chunk is read. Between chunks, accumulators
 * are stored in fp32, which changes no bit. */
#include "few_rows_bf16.h"
#include "int8_products.h"
#include "integer_strips.h"

#define MAX_CHUNK_STEPS 40     /* the most k-steps of a chunk; shorter chunks would store accumulators too often */
#define CHUNK_BYTES (MAX_CHUNK_STEPS * K_STEP_BYTES)
#define UNPACKED_STEPS 8       /* how many k-steps of codes are unpacked at once for a single strip; they stay in the L1
                                  cache */
#define PREFETCH_DISTANCE 8192 /* with a single strip, how many bytes ahead a weight is prefetched */
#define BLOCK_BYTES (256L << 10) /* the most bytes of inputs in a block of more than 64 rows */

/* With every pair of k, the cache lines at `next` and `next + second` are prefetched. Then `next` advances by `advance`
 * bytes. */
typedef struct {
    const char *next;
    long advance, second;
} Prefetch;

/* Multiplies a strip of rows by some pairs of k of a panel. x: [k-steps][rows][32], from the first pair on. first: if
 * true, sums start from zero, else from acc [rows][32]. If `end` is NULL, sums are stored in acc. Otherwise a group is
 * complete, and its sums are scaled and added to total [rows][32]. */
typedef void StripKernel(const char *x, const char *weight, long pairs, float *acc, int first, const Prefetch *prefetch,
                         const GroupEnd *end, float *total);

/* The layout of a copied block of rows: each strip is [K/32][rows of the strip][32]. */
typedef struct {
    Strips strips;
    long steps, chunk; /* steps: how many k-steps K has; chunk: how many k-steps a chunk has */
} Layout;

static size_t copied_bytes(const Gemm *g, long rows) {
    if (has_int8_inputs(g->weight)) return int8_rows_bytes(g, rows);
    return multiplies_integers(g) ? integer_rows_bytes(g, rows) : rows * ceil_div(g->k, 32) * 64;
}

/* Returns the number of rows of a block: small enough to leave space for the weights in the L2 cache. */
static long block_rows(const Gemm *g) {
    if (has_int8_inputs(g->weight)) return rows_of_block(g, copied_bytes(g, 1));
    if (multiplies_integers(g)) return rows_of_block(g, copied_bytes(g, 1));
    long most = min_long(BLOCK_BYTES / copied_bytes(g, 1) / 32 * 32, MAX_BLOCK_ROWS);
    return even_blocks(g->t, max_long(most, 64), 32);
}

static void repack_rows(const Gemm *g, const char *x, const Layout *s, char *to) {
    long whole = g->k / 32, left = g->k % 32;
    for (long i = 0; i < s->strips.count; i++) {
        long rows = s->strips.strip[i].rows;
        for (long r = 0; r < rows; r++, x += row_bytes(g)) {
            char *at = to + r * 64;
            for (long j = 0; j < whole; j++, at += rows * 64) _mm512_store_si512(at, _mm512_loadu_si512(x + j * 64));
            if (left) _mm512_store_si512(at, _mm512_maskz_loadu_epi16((1u << left) - 1, x + whole * 64));
        }
        to += rows * s->steps * 64;
    }
}

INLINE void store_sums(__m512 sum[][2], float *acc, const GroupEnd *end, float *total, const int rows) {
    for (int j = 0; j < 2; j++) {
        vf scale, minimum = broadcast(0);
        if (end) scale = load_scales(end->weight, end->head, j * 16);
        if (end && end->weight->has_minimum) minimum = load_minimums(end->weight, end->head, j * 16);
        for (int r = 0; r < rows; r++) {
            float *at = total + r * PANEL + j * 16;
            if (end)
                store_f32(at, add_group(load_f32(at), (vf)sum[r][j], scale, minimum, end, r));
            else
                _mm512_store_ps(acc + r * PANEL + j * 16, sum[r][j]);
        }
    }
}

INLINE void multiply_strip(const char *x, const char *weight, long pairs, float *acc, int first,
                           const Prefetch *prefetch, const GroupEnd *end, float *total, const int rows) {
    const char *next = prefetch->next;
    long advance = prefetch->advance, second = prefetch->second;
    __m512 sum[MAX_STRIP_ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) sum[r][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(acc + r * PANEL + j * 16);
    for (long i = 0; i < pairs; i++, next += advance) {
        const char *w = weight + i / 16 * K_STEP_BYTES + i % 16 * 64, *at = x + i / 16 * rows * 64 + i % 16 * 4;
        __builtin_prefetch(next, 0, 3);
        __builtin_prefetch(next + second, 0, 3);
        __m512bh left = (__m512bh)_mm512_load_si512(w), right = (__m512bh)_mm512_load_si512(w + 1024);
        for (int r = 0; r < rows; r++) {
            __m512i pair = _mm512_set1_epi32(*(const int32_t *)(at + r * 64));
            __asm__("" : "+v"(pair)); /* keeps gcc from loading the pair once more for the second product */
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], (__m512bh)pair, left);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], (__m512bh)pair, right);
        }
    }
    store_sums(sum, acc, end, total, rows);
}

#define STRIP_KERNEL(n)                                                                                \
    static void strip_##n(const char *x, const char *w, long pairs, float *acc, int first,             \
                          const Prefetch *prefetch, const GroupEnd *end, float *total) {               \
        multiply_strip(x, w, pairs, acc, first, prefetch, end, total, n);                              \
    }
FOR_STRIP_ROWS(STRIP_KERNEL)

#define STRIP_ENTRY(rows) strip_##rows,
static StripKernel *const strip_kernels[] = {FOR_STRIP_ROWS(STRIP_ENTRY)};

/* With several strips, each prefetches a part of the next chunk. A single strip prefetches the weights that it needs
 * next. */
INLINE Prefetch plan_prefetch(const Layout *s, const char *weight) {
    if (s->strips.count == 1) return (Prefetch){weight + PREFETCH_DISTANCE, 128, 64};
    return (Prefetch){weight + s->chunk * K_STEP_BYTES, ceil_div(128, s->strips.count), 0};
}

/* Multiplies all strips by k-steps [step, step + steps) of a panel. */
static void multiply_plain(const Layout *s, const ThreadBuffers *buffers, long step, long steps, const char *weight) {
    Prefetch prefetch = plan_prefetch(s, weight);
    for (long i = 0; i < s->strips.count; i++, prefetch.next += steps * 16 * prefetch.advance) {
        long first = s->strips.strip[i].row, rows = s->strips.strip[i].rows;
        strip_kernels[rows - 1](buffers->rows + (first * s->steps + step * rows) * 64, weight, steps * 16,
                           buffers->acc + first * PANEL, step == 0, &prefetch, NULL, NULL);
    }
}

/* Multiplies all strips by unpacked k-steps [step, step + steps) of a panel, group by group. */
static void multiply_groups(const Gemm *g, const Layout *s, const ThreadBuffers *buffers, long panel, long step,
                            long steps, const char *weight, long block_rows) {
    const Weight *w = g->weight;
    long end_k = min_long((step + steps) * 32, s->steps * 32);
    Prefetch none = {weight, 0, 0};
    for (long i = 0; i < s->strips.count; i++)
        for (long k = step * 32, next; k < end_k; k = next) {
            long group = k / w->group, first = s->strips.strip[i].row, rows = s->strips.strip[i].rows;
            int last = group + 1 == group_count(w); /* the last group ends with the padding of K, and may be shorter */
            long group_end = last ? s->steps * 32 : (group + 1) * w->group;
            next = min_long(group_end, end_k);
            GroupEnd end = {w, group_at(w, panel, group), buffers->input_sums + group * block_rows + first};
            strip_kernels[rows - 1](buffers->rows + (first * s->steps + k / 32 * rows) * 64 + k % 32 * 2,
                               weight + (k / 32 - step) * K_STEP_BYTES + k % 32 * 32, (next - k) / 2,
                               buffers->acc + first * PANEL, k == group * w->group, &none,
                               next == group_end ? &end : NULL, buffers->total + first * PANEL);
        }
}

/* Computes one panel for the block of rows that starts at `row`. */
static void multiply_panel(const Gemm *g, const Layout *s, const ThreadBuffers *buffers, long row, long rows,
                           long panel) {
    int plain = g->weight->kind == PLAIN;
    if (has_int8_inputs(g->weight)) {
        multiply_int8_panel(g, &s->strips, buffers, panel);
        keep_block(g, buffers->results, buffers->total, row, rows, panel);
        return;
    }
    if (multiplies_integers(g)) {
        multiply_integer_panel(g, &s->strips, buffers, rows, panel);
        keep_block(g, buffers->results, buffers->total, row, rows, panel);
        return;
    }
    if (!plain && g->t <= FEW_ROWS) {
        few_rows_kernels[g->t - 1][g->weight->kind](g->weight, panel, buffers->rows, buffers->input_sums, buffers->acc);
        keep_block(g, buffers->results, buffers->acc, row, rows, panel);
        return;
    }
    if (!plain) memset(buffers->total, 0, rows * PANEL * sizeof(float));
    for (long step = 0, steps; step < s->steps; step += steps) {
        steps = min_long(s->chunk, s->steps - step);
        const char *weight = panel_pairs(g->weight, panel, step, steps, buffers->chunk, 0);
        if (plain)
            multiply_plain(s, buffers, step, steps, weight);
        else
            multiply_groups(g, s, buffers, panel, step, steps, weight, rows);
    }
    keep_block(g, buffers->results, plain ? buffers->acc : buffers->total, row, rows, panel);
}

static void load_rows(const Gemm *g, const char *x, long rows, const ThreadBuffers *buffers, Layout *s) {
    cut_strips(&s->strips, rows);
    if (has_int8_inputs(g->weight)) {
        round_rows(g, x, &s->strips, buffers->rows);
        return;
    }
    if (multiplies_integers(g)) {
        convert_rows(g, (const bf16 *)x, &s->strips, rows, integer_rows(g, buffers->rows, rows));
        return;
    }
    s->steps = ceil_div(g->k, 32), s->chunk = UNPACKED_STEPS;
    if (s->strips.count > 1)
        s->chunk = ceil_div(s->steps, ceil_div(s->steps, MAX_CHUNK_STEPS));
    else if (g->weight->kind == PLAIN)
        s->chunk = s->steps;
    repack_rows(g, x, s, buffers->rows);
}

#include "jobs.h"

GEMM(bf16, 1, multiply_units)
