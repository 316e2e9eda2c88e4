/* bf16 matmul on AMX tiles. Weights lie in panels of 32 columns: [N/32][K/32][2 tiles][16 pairs][16 columns][2].
 *
 * Four accumulators (32 rows x 32 columns) stay in tile registers over the whole K; fewer rows use the same
 * instructions on shorter tiles, so one row alone and the same row among a thousand have the same bits. */
#include "gemm.h"
#include "tiles.h"

#undef SUFFIX
#define SUFFIX amx
#define STEP_BYTES 2048 /* one k-step of a panel: two weight tiles */
#define AHEAD 8192      /* how far ahead of its use a weight is asked for */

static void shape_rows(long top, long bottom) {
    TileShapes s = {.palette = 1};
    for (int i = 0; i < 8; i++) s.bytes[i] = 64, s.rows[i] = 16;
    s.rows[0] = s.rows[1] = s.rows[4] = top;
    s.rows[2] = s.rows[3] = s.rows[5] = bottom ? bottom : 1;
    tiles_shape(&s);
}

INLINE void ask_for(const char *weight) {
    for (int i = 0; i < STEP_BYTES; i += 64) __builtin_prefetch(weight + AHEAD + i, 0, 2);
}

static void dot_two_high(const char *x, const char *weight, long steps, long stride, float *acc, int stream) {
    const char *low = x + 16 * stride;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (long s = 0; s < steps; s++, x += 64, low += 64, weight += STEP_BYTES) {
        if (stream) ask_for(weight);
        TILE_LOAD(6, weight, 64);
        TILE_LOAD(4, x, stride);
        TILE_LOAD(5, low, stride);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, weight + 1024, 64);
        TILE_DOT(2, 5, 6);
        TILE_DOT(1, 4, 7);
        TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, acc, 128);
    TILE_STORE(1, acc + 16, 128);
    TILE_STORE(2, acc + 16 * PANEL, 128);
    TILE_STORE(3, acc + 16 * PANEL + 16, 128);
}

static void dot_one_high(const char *x, const char *weight, long steps, long stride, float *acc, int stream) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (long s = 0; s < steps; s++, x += 64, weight += STEP_BYTES) {
        if (stream) ask_for(weight);
        TILE_LOAD(4, x, stride);
        TILE_LOAD(6, weight, 64);
        TILE_LOAD(7, weight + 1024, 64);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
    }
    TILE_STORE(0, acc, 128);
    TILE_STORE(1, acc + 16, 128);
}

/* The rows shaped last in *shaped, so that the tile shapes change only where a block's last rows do. */
static void do_block(const Gemm *g, Block b, long *shaped) {
    _Alignas(64) float acc[32 * PANEL];
    long steps = ceil_div(g->k, 32), stride = 2 * g->lda;
    for (long p = b.panel; p < b.panel + b.panels; p++) {
        const char *weight = g->weight + p * steps * STEP_BYTES;
        for (long r = b.row; r < b.row + b.rows; r += 32) {
            long rows = b.row + b.rows - r < 32 ? b.row + b.rows - r : 32;
            if (rows != *shaped) {
                shape_rows(rows < 16 ? rows : 16, rows - 16 > 0 ? rows - 16 : 0);
                *shaped = rows;
            }
            (rows > 16 ? dot_two_high : dot_one_high)(g->x + r * stride, weight, steps, stride, acc, r == b.row);
            put_block(g, acc, r, rows, p);
        }
    }
}

/* Tiles read whole steps of 32: rows of another length are copied with zeros behind them. */
static char *padded_rows(const Gemm *g) {
    long row = ceil_div(g->k, 32) * 64;
    char *copy = aligned_alloc(64, g->t * row);
    for (long i = 0; copy && i < g->t; i++) {
        memcpy(copy + i * row, g->x + 2 * i * g->lda, 2 * g->k);
        memset(copy + i * row + 2 * g->k, 0, row - 2 * g->k);
    }
    return copy;
}

static void walk(const Gemm *g, int threads) {
    Cut cut = cut_work(g, threads, 2);
    long items = cut.row_blocks * cut.panel_blocks, next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        long shaped = 0, item;
        while ((item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items) do_block(g, block_of(g, &cut, item), &shaped);
        tiles_release();
    }
}

/* Returns 0, or 1 when memory for padding could not be had. */
__attribute__((visibility("default"))) int gemm_bf16_amx(const char *x, const char *weight, const float *bias, char *out,
                                                         long t, long n, long k, int out_bf16, int threads) {
    Gemm g = {x, weight, bias, out, t, n, k, k, out_bf16};
    char *copy = k % 32 ? padded_rows(&g) : NULL;
    if (k % 32 && !copy) return 1;
    if (copy) g.x = copy, g.lda = ceil_div(k, 32) * 32;
    walk(&g, threads_for(&g, threads, 2));
    free(copy);
    return 0;
}
