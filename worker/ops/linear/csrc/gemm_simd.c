/* Matmul in SIMD registers: for fp32 on all processors, and for bf16 on processors without a bf16 dot product.
 *
 * Codes that stand for small integers are multiplied as integers if inputs are bf16 (integer_strips.h). Other codes are
 * unpacked to fp32, one chunk of a panel at a time, once for all rows of a block. bf16 numbers are unpacked in the same
 * way if there are too many rows for pair_strips.h to be fast. Every element is one chain of fused multiply-adds over
 * k = 0, 1, ... Between chunks the element is stored in fp32, which changes no bit. Plain fp32 panels are
 * [N/32][K][32]. */
#include "few_rows_f32.h"
#include "int8_products.h"
#include "integer_strips.h"
#include "pair_strips.h"

#define CHUNK 128 /* how many inputs of a panel are unpacked at once: their fp32 numbers (16 KB) stay in the L1 cache */
#define CHUNK_BYTES (CHUNK * PANEL * sizeof(float))

/* The cache lines [at, end) that are prefetched while a strip is multiplied, `each` lines in every step of SIMD_WIDTH
 * inputs. */
typedef struct {
    const char *at, *end;
    long each;
} Ahead;

/* Multiplies a strip of rows by some inputs of a panel. x: [k / SIMD_WIDTH][rows][SIMD_WIDTH]; numbers: [k][32]; first:
 * if true, sums start from zero, else from acc [rows][32]. If `end` is NULL, sums are stored in acc. Otherwise a group
 * is complete, and its sums are scaled and added to total [rows][32]. */
typedef void StripKernel(const float *x, const float *numbers, long k, float *acc, int first, const GroupEnd *end,
                         float *total, Ahead ahead);

typedef Strips Layout;

INLINE float *fp32_rows(const ThreadBuffers *buffers) { return (float *)buffers->rows; }

/* Returns K, padded to whole blocks of codes. For plain fp32 weights, which are not padded, returns K. */
INLINE long padded_depth(const Gemm *g) {
    return g->x_bf16 || g->weight->kind != PLAIN ? ceil_div(g->k, CODE_BLOCK) * CODE_BLOCK : g->k;
}

/* Returns the elements of a row in a thread's copy: K padded to whole registers. */
INLINE long stored_depth(const Gemm *g) { return ceil_div(padded_depth(g), SIMD_WIDTH) * SIMD_WIDTH; }

static size_t copied_bytes(const Gemm *g, long rows) {
    if (has_int8_inputs(g->weight)) return int8_rows_bytes(g, rows);
    return multiplies_integers(g) ? integer_rows_bytes(g, rows) : rows * stored_depth(g) * sizeof(float);
}

static long block_rows(const Gemm *g) { return rows_of_block(g, copied_bytes(g, 1)); }

/* Copies a block of rows as fp32. Each strip becomes [K / SIMD_WIDTH][rows of the strip][SIMD_WIDTH], zero-padded. */
static void repack_rows(const Gemm *g, const char *x, const Layout *s, float *to) {
    for (long i = 0; i < s->count; i++) {
        long rows = s->strip[i].rows;
        for (long r = 0; r < rows; r++, x += row_bytes(g)) {
            float *at = to + r * SIMD_WIDTH;
            for (long k = 0; k < stored_depth(g); k += SIMD_WIDTH, at += rows * SIMD_WIDTH) {
                vf inputs = k >= g->k ? broadcast(0) : g->x_bf16 ? load(x, k, g->k, 1) : load(x, k, g->k, 0);
                store_f32(at, inputs);
            }
        }
        to += rows * stored_depth(g);
    }
}

/* Adds the products of `count` neighbouring inputs, which are in the same block of SIMD_WIDTH inputs of x. */
INLINE void multiply_inputs(const float *x, const float *weight, vf sum[][PANEL_REGISTERS], const int count,
                            const int rows, const int registers) {
    for (int i = 0; i < count; i++, weight += PANEL) {
        vf w[PANEL_REGISTERS];
        for (int j = 0; j < registers; j++) w[j] = load_f32(weight + j * SIMD_WIDTH);
        for (int r = 0; r < rows; r++) {
            vf number = broadcast(x[r * SIMD_WIDTH + i]);
            for (int j = 0; j < registers; j++) sum[r][j] = simd_fma(number, w[j], sum[r][j]);
        }
    }
}

INLINE void prefetch_ahead(Ahead *ahead) {
    for (long i = 0; i < ahead->each && ahead->at < ahead->end; i++, ahead->at += 64)
        __builtin_prefetch(ahead->at, 0, 3);
}

/* Multiplies a strip by `registers` registers of columns, from `column` on. The sums stay in registers. */
INLINE void multiply_columns(const float *x, const float *numbers, long k, float *acc, int first, const GroupEnd *end,
                             float *total, Ahead *ahead, int column, const int rows, const int registers) {
    vf sum[MAX_STRIP_ROWS][PANEL_REGISTERS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++)
            sum[r][j] = first ? broadcast(0) : load_f32(acc + r * PANEL + column + j * SIMD_WIDTH);
    numbers += column;
    for (; k >= SIMD_WIDTH; k -= SIMD_WIDTH, x += rows * SIMD_WIDTH, numbers += SIMD_WIDTH * PANEL) {
        prefetch_ahead(ahead);
        multiply_inputs(x, numbers, sum, SIMD_WIDTH, rows, registers);
    }
    for (; k > 0; k--, x++, numbers += PANEL) multiply_inputs(x, numbers, sum, 1, rows, registers);
    for (int j = 0; j < registers; j++, column += SIMD_WIDTH) {
        vf scale, minimum = broadcast(0);
        if (end) scale = load_scales(end->weight, end->head, column);
        if (end && end->weight->has_minimum) minimum = load_minimums(end->weight, end->head, column);
        for (int r = 0; r < rows; r++) {
            float *at = total + r * PANEL + column;
            if (end)
                store_f32(at, add_group(load_f32(at), sum[r][j], scale, minimum, end, r));
            else
                store_f32(acc + r * PANEL + column, sum[r][j]);
        }
    }
}

#define STRIP_KERNEL(rows)                                                                                     \
    static void strip_##rows(const float *x, const float *numbers, long k, float *acc, int first,              \
                             const GroupEnd *end, float *total, Ahead ahead) {                                 \
        const int registers = registers_at_once(rows);                                                         \
        for (int j = 0; j < PANEL_REGISTERS; j += registers)                                                   \
            multiply_columns(x, numbers, k, acc, first, end, total, &ahead, j * SIMD_WIDTH, rows, registers);  \
    }
FOR_STRIP_ROWS(STRIP_KERNEL)

#define STRIP_ENTRY(rows) strip_##rows,
static StripKernel *const strip_kernels[] = {FOR_STRIP_ROWS(STRIP_ENTRY)};

/* Multiplies all strips by inputs [from, from + count) of a panel, group by group. */
static void multiply_groups(const Gemm *g, const Layout *s, const ThreadBuffers *buffers, long panel, long from,
                            long count, const float *numbers) {
    const Weight *w = g->weight;
    long depth = stored_depth(g), block_rows = s->strip[s->count - 1].row + s->strip[s->count - 1].rows;
    for (long i = 0; i < s->count; i++)
        for (long k = from, part; k < from + count; k += part) {
            long group = k / w->group, first = s->strip[i].row;
            long group_end = min_long((group + 1) * w->group, padded_depth(g));
            part = min_long(group_end, from + count) - k;
            GroupEnd end = {w, group_at(w, panel, group), buffers->input_sums + group * block_rows + first};
            strip_kernels[s->strip[i].rows - 1](fp32_rows(buffers) + first * depth + k * s->strip[i].rows, numbers + (k - from) * PANEL,
                               part, buffers->acc + first * PANEL, k == group * w->group,
                               k + part == group_end ? &end : NULL, buffers->total + first * PANEL, (Ahead){0});
        }
}

/* Returns the cache lines of the chunk of plain numbers at `next` that strip i prefetches. A strip prefetches some lines
 * in every step of SIMD_WIDTH inputs. So memory is read while a chunk is multiplied, and not only while the chunk is
 * unpacked, or multiplied by the first strip. */
INLINE Ahead share_of_chunk(const Gemm *g, const char *next, const Strips *s, long i, long count) {
    long lines = CHUNK * PANEL * (g->x_bf16 ? sizeof(bf16) : sizeof(float)) / 64, rows = s->strip[i].rows;
    long steps = max_long(count / SIMD_WIDTH * (PANEL_REGISTERS / registers_at_once(rows)), 1);
    long begin = lines * i / s->count, end = lines * (i + 1) / s->count;
    return (Ahead){next + begin * 64, next + end * 64, ceil_div(end - begin, steps)};
}

/* Returns the chunk that follows in memory, to be prefetched, or NULL: one or two rows of fp32 read memory as fast as it
 * comes. Nothing follows the last chunk of a weight; to prefetch any address is harmless. */
INLINE const char *next_chunk(const Gemm *g, const float *numbers, long panel, long end, long count) {
    if (g->x_bf16) return pairs_at(g->weight, panel, end);
    return g->t > 2 ? (const char *)(numbers + count * PANEL) : NULL;
}

/* Multiplies all strips by inputs [from, from + count) of a plain panel. next: see next_chunk */
static void multiply_plain(const Gemm *g, const Layout *s, const ThreadBuffers *buffers, long from, long count,
                           const float *numbers, const char *next) {
    for (long i = 0; i < s->count; i++) {
        long row = s->strip[i].row, rows = s->strip[i].rows;
        Ahead ahead = next ? share_of_chunk(g, next, s, i, count) : (Ahead){0};
        strip_kernels[rows - 1](fp32_rows(buffers) + row * stored_depth(g) + from * rows, numbers, count,
                                buffers->acc + row * PANEL, from == 0, NULL, NULL, ahead);
    }
}

/* Multiplies all strips by a panel of pairs of bf16 numbers. */
static void multiply_pairs(const Gemm *g, const Layout *s, const ThreadBuffers *buffers, long panel) {
    const char *pairs = pairs_at(g->weight, panel, 0);
    for (long from = 0, count; from < padded_depth(g); from += count) {
        count = min_long(CHUNK, padded_depth(g) - from);
        for (long i = 0; i < s->count; i++) {
            long first = s->strip[i].row, rows = s->strip[i].rows;
            const float *x = fp32_rows(buffers) + first * stored_depth(g) + from * rows;
            pair_strips[rows - 1](x, pairs, from, count, buffers->acc + first * PANEL);
        }
    }
}

/* Computes one panel for the block of rows that starts at `row`. */
static void multiply_panel(const Gemm *g, const Layout *s, const ThreadBuffers *buffers, long row, long rows,
                           long panel) {
    int plain = g->weight->kind == PLAIN;
    if (has_int8_inputs(g->weight)) {
        multiply_int8_panel(g, s, buffers, panel);
        keep_block(g, buffers->results, buffers->total, row, rows, panel);
        return;
    }
    if (multiplies_integers(g)) {
        multiply_integer_panel(g, s, buffers, rows, panel);
        keep_block(g, buffers->results, buffers->total, row, rows, panel);
        return;
    }
    if (!plain && g->t <= FEW_ROWS) {
        few_rows_kernels[g->t - 1][g->weight->kind - TABLE4](g->weight, panel, fp32_rows(buffers),
                                                               buffers->input_sums, buffers->acc);
        keep_block(g, buffers->results, buffers->acc, row, rows, panel);
        return;
    }
    if (plain && g->x_bf16 && g->t <= MOST_PAIR_ROWS) {
        multiply_pairs(g, s, buffers, panel);
        keep_block(g, buffers->results, buffers->acc, row, rows, panel);
        return;
    }
    if (!plain) memset(buffers->total, 0, rows * PANEL * sizeof(float));
    for (long from = 0, count; from < padded_depth(g); from += count) {
        count = min_long(CHUNK, padded_depth(g) - from);
        const float *numbers = panel_numbers(g, panel, from, count, (float *)buffers->chunk);
        if (plain)
            multiply_plain(g, s, buffers, from, count, numbers, next_chunk(g, numbers, panel, from + count, count));
        else
            multiply_groups(g, s, buffers, panel, from, count, numbers);
    }
    keep_block(g, buffers->results, plain ? buffers->acc : buffers->total, row, rows, panel);
}

static void load_rows(const Gemm *g, const char *x, long rows, const ThreadBuffers *buffers, Layout *s) {
    cut_strips(s, rows);
    if (has_int8_inputs(g->weight))
        round_rows(g, x, s, buffers->rows);
    else if (multiplies_integers(g))
        convert_rows(g, (const bf16 *)x, s, rows, integer_rows(g, buffers->rows, rows));
    else
        repack_rows(g, x, s, fp32_rows(buffers));
}

#include "jobs.h"

GEMM(f32, 0, multiply_units)
#ifndef __AVX512BF16__
GEMM(bf16, 1, multiply_units)
#endif
