/* bf16 matmul on AMX tiles. Weights lie in panels of 32 columns: [N/32][K/32][2 tiles][16 pairs][16 columns][2].
 *
 * Four accumulators (32 rows x 32 columns) take the k-steps in order. A few rows stream the weights once with the
 * accumulators in registers over the whole K, on tiles as short as the rows are few. Many rows are
 * walked in chunks of K whose weights stay in the first-level cache, the accumulators put down in between, which loses
 * no bit. So one row alone and the same row among a thousand have the same bits. */
#include "gemm.h"
#include "tiles.h"

#define STEP_BYTES 2048 /* one k-step of a panel: two weight tiles */
#define AHEAD 8192      /* how far ahead of its use a weight is asked for when few rows stream it */
#define CHUNK 8         /* k-steps of a chunk */
#define FEW 32          /* rows up to which weights are streamed */

static void shape_rows(long top, long bottom) {
    TileShapes s = {.palette = 1};
    for (int i = 0; i < 8; i++) s.bytes[i] = 64, s.rows[i] = 16;
    s.rows[0] = s.rows[1] = s.rows[4] = top;
    s.rows[2] = s.rows[3] = s.rows[5] = bottom;
    tiles_shape(&s);
}

INLINE void ask_for(const char *weight, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(weight + i, 0, 2);
}

#define FOUR(what)                           \
    do {                                     \
        what(0, acc, 4 * PANEL);             \
        what(1, acc + 16, 4 * PANEL);        \
        what(2, acc + 16 * PANEL, 4 * PANEL); \
        what(3, acc + 16 * PANEL + 16, 4 * PANEL); \
    } while (0)
#define CLEAR(tile, p, stride) TILE_ZERO(tile)

/* One k-step of 32 rows x 32 columns. */
INLINE void step(const char *top, const char *bottom, const char *weight, long stride) {
    TILE_LOAD(6, weight, 64);
    TILE_LOAD(4, top, stride);
    TILE_LOAD(5, bottom, stride);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, weight + 1024, 64);
    TILE_DOT(2, 5, 6);
    TILE_DOT(1, 4, 7);
    TILE_DOT(3, 5, 7);
}

static void stream_two_high(const char *x, const char *weight, long steps, long stride, float *acc) {
    FOUR(CLEAR);
    for (long s = 0; s < steps; s++, x += 64, weight += STEP_BYTES) {
        ask_for(weight + AHEAD, STEP_BYTES);
        step(x, x + 16 * stride, weight, stride);
    }
    FOUR(TILE_STORE);
}

static void stream_one_high(const char *x, const char *weight, long steps, long stride, float *acc) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    for (long s = 0; s < steps; s++, x += 64, weight += STEP_BYTES) {
        ask_for(weight + AHEAD, STEP_BYTES);
        TILE_LOAD(4, x, stride);
        TILE_LOAD(6, weight, 64);
        TILE_LOAD(7, weight + 1024, 64);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
    }
    TILE_STORE(0, acc, 4 * PANEL);
    TILE_STORE(1, acc + 16, 4 * PANEL);
}

static void do_few(const Gemm *g, Block b) {
    _Alignas(64) float acc[32 * PANEL];
    long steps = ceil_div(g->k, 32);
    shape_rows(b.rows < 16 ? b.rows : 16, b.rows > 16 ? b.rows - 16 : 1);
    for (long p = b.panel; p < b.panel + b.panels; p++) {
        const char *weight = g->weight + p * steps * STEP_BYTES;
        (b.rows > 16 ? stream_two_high : stream_one_high)(g->x + b.row * 2 * g->lda, weight, steps, 2 * g->lda, acc);
        put_block(g, acc, b.row, b.rows, p);
    }
}

/* What a chunk asks for while it computes: the next weights, and in the last chunk the lines of the results. */
typedef struct {
    const char *weight;
    long weight_bytes;
    const char *out;
    long out_rows, out_stride;
} Ahead;

INLINE void ask_ahead(const Ahead *a, long s) {
    for (long i = s * a->weight_bytes; i < (s + 1) * a->weight_bytes; i += 64) __builtin_prefetch(a->weight + i, 0, 3);
    for (long r = s * 4; r < least(s * 4 + 4, a->out_rows); r++) __builtin_prefetch(a->out + r * a->out_stride, 1, 3);
}

static void chunk(const char *x, long stride, const char *weight, long steps, float *acc, int first, const Ahead *ahead) {
    if (first) FOUR(CLEAR);
    else FOUR(TILE_LOAD);
    for (long s = 0; s < steps; s++, x += 64, weight += STEP_BYTES) {
        ask_ahead(ahead, s);
        step(x, x + 16 * stride, weight, stride);
    }
    FOUR(TILE_STORE);
}

/* 32 rows from `row` on; the last ones of x stand in g->tail if they are fewer. */
INLINE const char *rows_at(const Gemm *g, long row) { return row + 32 <= g->t ? g->x + row * 2 * g->lda : g->tail; }

static void do_chunk(const Gemm *g, Block b, long panel, long s, float *acc) {
    long steps = ceil_div(g->k, 32), high = ceil_div(b.rows, 32), share = ceil_div(STEP_BYTES, high * 64) * 64;
    long out_row = g->n * (g->out_bf16 ? 2 : 4);
    const char *weight = g->weight + (panel * steps + s) * STEP_BYTES;
    for (long r = 0; r < high; r++) {
        Ahead ahead = {weight + CHUNK * (STEP_BYTES + r * share), share, NULL, 0, out_row};
        if (s + CHUNK >= steps) {
            ahead.out = g->out + (b.row + r * 32) * out_row + panel * PANEL * out_row / g->n;
            ahead.out_rows = least(32, b.rows - r * 32);
        }
        chunk(rows_at(g, b.row + r * 32) + s * 64, 2 * g->lda, weight, least(CHUNK, steps - s), acc + r * 32 * PANEL, s == 0,
              &ahead);
    }
}

static void do_many(const Gemm *g, Block b) {
    _Alignas(64) float acc[MOST_BLOCK_ROWS * PANEL];
    shape_rows(16, 16);
    for (long p = b.panel; p < b.panel + b.panels; p++) {
        for (long s = 0; s < ceil_div(g->k, 32); s += CHUNK) do_chunk(g, b, p, s, acc);
        put_block(g, acc, b.row, b.rows, p);
    }
}

static void walk(const Gemm *g, int threads) {
    int many = g->t > FEW;
    Cut cut = cut_work(g, threads, many ? MOST_BLOCK_ROWS : FEW);
    long items = cut.row_blocks * cut.panel_blocks, next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        long item;
        while ((item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items)
            (many ? do_many : do_few)(g, block_of(g, &cut, item));
        tiles_release();
    }
}

/* Rows [from, t) with zeros behind each and below them, to whole tiles: tiles read nothing else. */
static char *padded_rows(const Gemm *g, long from) {
    long row = ceil_div(g->k, 32) * 64, rows = ceil_div(g->t - from, 32) * 32;
    char *copy = aligned_alloc(64, rows * row);
    if (!copy) return NULL;
    memset(copy, 0, rows * row);
    for (long i = from; i < g->t; i++) memcpy(copy + (i - from) * row, g->x + 2 * i * g->k, 2 * g->k);
    return copy;
}

/* Returns 0, or 1 when memory for padding could not be had. */
__attribute__((visibility("default"))) int gemm_bf16_amx(const char *x, const char *weight, const float *bias, char *out,
                                                         long t, long n, long k, int out_bf16, int threads) {
    Gemm g = {x, NULL, weight, bias, out, t, n, k, k, out_bf16};
    int odd = k % 32 != 0, ragged = t > FEW && t % 32;
    if (!t) return 0;
    char *copy = odd ? padded_rows(&g, 0) : ragged ? padded_rows(&g, t / 32 * 32) : NULL;
    if ((odd || ragged) && !copy) return 1;
    if (odd) g.x = copy, g.lda = ceil_div(k, 32) * 32;
    g.tail = odd ? copy + t / 32 * 64 * g.lda : copy;
    walk(&g, threads_for(&g, threads, 2));
    free(copy);
    return 0;
}
