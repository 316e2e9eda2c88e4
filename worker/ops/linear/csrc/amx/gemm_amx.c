/* bf16 matmul on AMX tiles. Weights are packed in panels of 32 columns: [N/32][K/32][2 tiles][16 pairs][16 columns][2].
 *
 * Four accumulator tiles (32 rows x 32 columns) add the k-steps in order. With up to 32 rows, the weights are read
 * once, the accumulators stay in tiles over all of K, and tiles are only as high as there are rows. With more rows,
 * blocks of rows are repacked as tiles, K is cut into chunks whose weights fit in the L1 cache, and accumulators are
 * stored in fp32 between chunks, which changes no bit. So a row has the same bits alone and among a thousand rows. */
#include "amx_codes.h"
#include "amx_few_rows.h"
#include "amx_integers.h"
#include "int8_products.h"

#define MAX_BLOCK_ROWS 512     /* the most rows of a block */
#define BLOCK_BYTES (1L << 20) /* the most bytes of a block that has more than 64 rows */
#define MIN_REPACK_COLUMNS 2048           /* with fewer columns, repacking rows as tiles is not worth it */

/* How a thread keeps a block of rows. */
typedef struct {
    RowLayout x;  /* the layout for tiles */
    int few_rows; /* whether SIMD registers are used and not tiles */
    Strips strips; /* only for a few rows of integers, as a single strip, and for inputs of 8 bits */
} Layout;

INLINE int is_many(const Gemm *g) { return g->t > MAX_STREAMED_ROWS; }

INLINE int uses_vectors(const Gemm *g) {
    if (multiplies_integers(g)) return g->t <= FEW_INTEGER_ROWS;
    return g->weight->kind != PLAIN && g->t <= (g->weight->group < FEW_ROWS_GROUP ? FEW_ROWS : 1);
}

/* Returns whether to repack rows as tiles. Repacking saves time if many panels read more than one tile of rows. It is
 * required if many rows do not fill whole tiles, or if K is not a multiple of 32. */
static int repacks(const Gemm *g, long rows) {
    if (g->k % 32 || (is_many(g) && rows % 16)) return 1;
    return g->t > 16 && g->n >= MIN_REPACK_COLUMNS;
}

static size_t copied_bytes(const Gemm *g, long rows) {
    if (has_int8_inputs(g->weight)) return int8_rows_bytes(g, rows);
    if (multiplies_integers(g)) return uses_vectors(g) ? integer_rows_bytes(g, rows) : integer_tiles_bytes(g, rows);
    return ceil_div(rows, 32) * ceil_div(g->k, 32) * K_STEP_BYTES;
}

/* Returns the rows of a block. Large blocks leave space for the weights in the L2 cache. */
static long block_rows(const Gemm *g) {
    if (has_int8_inputs(g->weight)) return rows_of_block(g, copied_bytes(g, 1));
    if (!is_many(g)) return MAX_STREAMED_ROWS;
    long most = min_long(BLOCK_BYTES / (ceil_div(g->k, 32) * 64) / 32 * 32, MAX_BLOCK_ROWS);
    return even_blocks(g->t, max_long(most, 64), 32);
}

INLINE __m512i load_k_step(const Gemm *g, const char *x, long row, long rows, long step) {
    long left = g->k - step * 32;
    __mmask32 there = row >= rows || left <= 0 ? 0 : left >= 32 ? 0xffffffffu : (1u << left) - 1;
    return _mm512_maskz_loadu_epi16(there, x + row * row_bytes(g) + step * 64);
}

static void repack_rows(const Gemm *g, const char *x, long rows, char *to) {
    long steps = ceil_div(g->k, 32);
    for (long r = 0; r < rows; r += 32)
        for (long s = 0; s < steps; s += 4)
            for (long i = 0; i < 32; i++) {
                char *at = to + (r * steps + s * 32) * 64 + i * 64;
                if (r + i < rows)
                    for (long ahead = 4; ahead < 8; ahead++)
                        __builtin_prefetch(x + (r + i) * row_bytes(g) + (s + ahead) * 64, 0, 3);
                for (long j = s; j < min_long(s + 4, steps); j++, at += K_STEP_BYTES)
                    _mm512_store_si512(at, load_k_step(g, x, r + i, rows, j));
            }
}

static void load_rows(const Gemm *g, const char *x, long rows, const ThreadBuffers *buffers, Layout *layout) {
    if (has_int8_inputs(g->weight)) {
        cut_strips(&layout->strips, rows);
        round_rows(g, x, &layout->strips, buffers->rows);
        return;
    }
    layout->few_rows = uses_vectors(g);
    if (layout->few_rows) {
        if (multiplies_integers(g)) {
            cut_strips(&layout->strips, rows);
            convert_rows(g, (const bf16 *)x, &layout->strips, rows, integer_rows(g, buffers->rows, rows));
        } else
            widen_rows(g, x, (float *)buffers->rows);
        return;
    }
    configure_tiles(is_many(g) ? 16 : min_long(g->t, 16), is_many(g) ? 16 : max_long(g->t - 16, 1));
    if (multiplies_integers(g)) {
        convert_to_tiles(g, (const bf16 *)x, integer_tiles(g, buffers->rows, rows));
        return;
    }
    layout->x = (RowLayout){x, 32 * row_bytes(g), row_bytes(g), 64};
    if (!repacks(g, rows)) return;
    repack_rows(g, x, rows, buffers->rows);
    layout->x = (RowLayout){buffers->rows, ceil_div(g->k, 32) * K_STEP_BYTES, 64, K_STEP_BYTES};
}

/* Computes one panel for up to 32 rows. The accumulators stay in tiles over all of K. */
static void multiply_streamed(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long panel) {
    _Alignas(64) float acc[32 * PANEL];
    long steps = ceil_div(g->k, 32);
    const char *weight = panel_pairs(g->weight, panel, 0, steps, NULL, 0);
    EACH_ACCUMULATOR(ZERO_TILE, g->t > 16);
    if (g->t > 16)
        stream_32_rows(x, x->base, weight, steps, K_STEP_BYTES);
    else
        stream_16_rows(x, x->base, weight, steps, K_STEP_BYTES);
    EACH_ACCUMULATOR(TILE_STORE, g->t > 16);
    keep_block(g, buffers->results, acc, 0, g->t, panel);
}

/* Computes one panel for a block of rows. */
static void multiply_blocked(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long row, long rows,
                             long panel) {
    long steps = ceil_div(g->k, 32), high = ceil_div(rows, 32), prefetch_bytes = ceil_div(K_STEP_BYTES, high * 64) * 64;
    int bypass = can_bypass_caches(g);
    for (long s = 0; s < steps; s += CHUNK_STEPS)
        for (long r = 0; r < high; r++) {
            const char *weight = panel_pairs(g->weight, panel, s, 0, NULL, 0);
            const char *at = x->base + r * x->block_stride + s * x->step_stride;
            const char *next = weight + CHUNK_STEPS * (K_STEP_BYTES + r * prefetch_bytes);
            float *acc = buffers->acc + r * 32 * PANEL;
            long here = min_long(32, rows - r * 32), some = min_long(CHUNK_STEPS, steps - s);
            if (here > 16)
                multiply_chunk(x, at, weight, some, acc, acc, s == 0, next, prefetch_bytes, 1);
            else
                multiply_chunk(x, at, weight, some, acc, acc, s == 0, next, prefetch_bytes, 0);
            if (s + CHUNK_STEPS < steps) continue;
            (bypass ? store_past_caches : store_tiles)(g, acc, row + r * 32, here, panel);
        }
}

static void multiply_few_rows(const Gemm *g, const ThreadBuffers *buffers, long panel) {
    if (multiplies_integers(g))
        multiply_few_integer_rows(g, buffers, panel);
    else
        few_rows_kernels[g->t - 1][g->weight->kind](g->weight, panel, (const float *)buffers->rows,
                                                    buffers->input_sums, buffers->total);
    keep_block(g, buffers->results, buffers->total, 0, g->t, panel);
}

static void multiply_panel(const Gemm *g, const Layout *layout, const ThreadBuffers *buffers, long row, long rows,
                           long panel) {
    const RowLayout *x = &layout->x;
    if (has_int8_inputs(g->weight)) {
        multiply_int8_panel(g, &layout->strips, buffers, panel);
        keep_block(g, buffers->results, buffers->total, row, rows, panel);
        return;
    }
    if (layout->few_rows)
        multiply_few_rows(g, buffers, panel);
    else if (multiplies_integers(g))
        multiply_integers(g, buffers, row, rows, panel);
    else if (g->weight->kind == PLAIN)
        is_many(g) ? multiply_blocked(g, x, buffers, row, rows, panel) : multiply_streamed(g, x, buffers, panel);
    else
        is_many(g) ? multiply_blocked_codes(g, x, buffers, row, rows, panel)
                   : multiply_streamed_codes(g, x, buffers, panel);
}

#include "jobs.h"

static int multiply_with_tiles(const Gemm *products, WorkRange *ranges, int threads) {
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040); /* denormals are zeros, as in tiles */
    int failed = multiply_units(products, ranges, threads);
    _mm_sfence(); /* store_past_caches needs it */
    tiles_release();
    _mm_setcsr(mode);
    return failed;
}

GEMM(bf16, 1, multiply_with_tiles)
