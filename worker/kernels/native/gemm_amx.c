/* bf16 matmul on AMX tiles. Weights lie in panels of 32 columns: [N/32][K/32][2 tiles][16 pairs][16 columns][2].
 *
 * Four accumulators (32 rows x 32 columns) take the k-steps in order. A few rows stream the weights once with the
 * accumulators in registers over the whole K, on tiles as short as the rows are few. Many rows are packed like the
 * weights and walked in chunks of K that stay in the first-level cache, the accumulators put down in between, which
 * loses no bit. So one row alone and the same row among a thousand have the same bits. */
#include "gemm.h"
#include "tiles.h"

#define STEP_BYTES 2048 /* one k-step of a panel: two weight tiles; or of 32 packed rows: two tiles of x */
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

typedef struct {
    _Alignas(64) char x[CACHE_BYTES + (256 << 10)]; /* [K / (32 CHUNK)][rows / 32][CHUNK][2 tiles][16 rows][32] */
    float acc[MOST_BLOCK_ROWS * PANEL];
} Room;

INLINE __mmask32 first_of_32(long left) { return left >= 32 ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0; }

/* One chunk of 32 rows (fewer: the others zeros) as tiles, zeros beyond K. */
INLINE void pack_chunk(const Gemm *g, char *to, long row, long rows, long s, long depth) {
    for (long r = 0; r < 32; r++)
        for (long i = 0; i < depth; i++) {
            __mmask32 mask = r < rows ? first_of_32(g->k - 32 * (s + i)) : 0;
            const char *x = g->x + (row + r) * 2 * g->lda + 64 * (s + i);
            _mm512_store_si512(to + i * STEP_BYTES + r * 64, _mm512_maskz_loadu_epi16(mask, x));
        }
}

static void pack_rows(const Gemm *g, Room *room, Block b) {
    long steps = ceil_div(g->k, 32);
    char *to = room->x;
    for (long s = 0; s < steps; s += CHUNK)
        for (long r = 0; r < b.rows; r += 32, to += CHUNK * STEP_BYTES)
            pack_chunk(g, to, b.row + r, b.rows - r, s, least(CHUNK, steps - s));
}

/* What a chunk asks for while it computes: the next weights, and in the last chunk the lines of the results. */
typedef struct {
    const char *weight;
    long weight_bytes;
    const char *out;
    long out_rows, out_stride;
} Ahead;

INLINE void ask_ahead(const Ahead *a, long s) {
    for (long i = s * a->weight_bytes; i < (s + 1) * a->weight_bytes; i += 64) __builtin_prefetch(a->weight + i, 0, 2);
    for (long r = s * 4; r < least(s * 4 + 4, a->out_rows); r++) __builtin_prefetch(a->out + r * a->out_stride, 1, 3);
}

static void chunk(const char *x, const char *weight, long steps, float *acc, int first, const Ahead *ahead) {
    if (first) FOUR(CLEAR);
    else FOUR(TILE_LOAD);
    for (long s = 0; s < steps; s++, x += STEP_BYTES, weight += STEP_BYTES) {
        ask_ahead(ahead, s);
        step(x, x + 1024, weight, 64);
    }
    FOUR(TILE_STORE);
}

static void do_many(const Gemm *g, Room *room, Block b) {
    long steps = ceil_div(g->k, 32), high = ceil_div(b.rows, 32), share = ceil_div(STEP_BYTES, high * 64) * 64;
    long out_row = g->n * (g->out_bf16 ? 2 : 4);
    for (long p = b.panel; p < b.panel + b.panels; p++) {
        for (long s = 0; s < steps; s += CHUNK) {
            const char *weight = g->weight + (p * steps + s) * STEP_BYTES;
            for (long r = 0; r < high; r++) {
                Ahead ahead = {weight + CHUNK * (STEP_BYTES + r * share), share, NULL, 0, out_row};
                if (s + CHUNK >= steps) {
                    ahead.out = g->out + (b.row + r * 32) * out_row + p * PANEL * out_row / g->n;
                    ahead.out_rows = least(32, b.rows - r * 32);
                }
                chunk(room->x + (s * high + r * CHUNK) * STEP_BYTES, weight, least(CHUNK, steps - s),
                      room->acc + r * 32 * PANEL, s == 0, &ahead);
            }
        }
        for (long r = 0; r < b.rows; r += 32) put_block(g, room->acc + r * PANEL, b.row + r, least(32, b.rows - r), p);
    }
}

static Room *room_here(void) {
    static _Thread_local Room room;
    return &room;
}

/* Each thread packs the rows of its item unless it has them from the item before. */
static void walk(const Gemm *g, int threads, Cut cut, int many) {
    long items = cut.row_blocks * cut.panel_blocks, next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Room *room = many ? room_here() : NULL;
        long item, held = -1;
        if (many) shape_rows(16, 16);
        while ((item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items) {
            Block b = block_of(g, &cut, item);
            if (many && b.row != held) pack_rows(g, room, b), held = b.row;
            if (many) do_many(g, room, b);
            else do_few(g, b);
        }
        tiles_release();
    }
}

/* Tiles read whole steps of 32: a few rows of another length are copied with zeros behind them. */
static char *padded_rows(const Gemm *g) {
    long row = ceil_div(g->k, 32) * 64;
    char *copy = aligned_alloc(64, at_least(g->t * row, 64));
    for (long i = 0; copy && i < g->t; i++) {
        memcpy(copy + i * row, g->x + 2 * i * g->lda, 2 * g->k);
        memset(copy + i * row + 2 * g->k, 0, row - 2 * g->k);
    }
    return copy;
}

/* Returns 0, or 1 when memory for padding could not be had. */
__attribute__((visibility("default"))) int gemm_bf16_amx(const char *x, const char *weight, const float *bias, char *out,
                                                         long t, long n, long k, int out_bf16, int threads) {
    Gemm g = {x, weight, bias, out, t, n, k, k, out_bf16};
    long row = ceil_div(k, 32) * 64;
    threads = threads_for(&g, threads, 2);
    if (t > FEW && row * 32 <= CACHE_BYTES) {
        walk(&g, threads, cut_work(&g, threads, rows_kept(row)), 1);
        return 0;
    }
    char *copy = k % 32 ? padded_rows(&g) : NULL;
    if (k % 32 && !copy) return 1;
    if (copy) g.x = copy, g.lda = row / 2;
    walk(&g, threads, cut_work(&g, threads, FEW), 0);
    free(copy);
    return 0;
}
