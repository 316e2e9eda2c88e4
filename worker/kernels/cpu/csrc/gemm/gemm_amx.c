/* bf16 matmul on AMX tiles. Weights lie in panels of 32 columns: [N/32][K/32][2 tiles][16 pairs][16 columns][2].
 *
 * Four accumulators (32 rows x 32 columns) take the k-steps in order. A few rows stream the weights once with the
 * accumulators in registers over the whole K, on tiles as short as the rows are few. Many rows are laid out as tiles and
 * walked in chunks of K, the accumulators put down in between, which loses no bit. So one row alone and the same row
 * among a thousand have the same bits. */
#include "gemm/gemm.h"
#include "work_sharing.h"
#include "amx_tiles.h"

#define STEP_BYTES 2048 /* one k-step of a panel: two weight tiles */
#define AHEAD 8192      /* how far ahead of its use a weight is asked for when few rows stream it */
#define CHUNK 8         /* k-steps of a chunk: their weights stay in the first-level cache */
#define FEW 32          /* rows up to which weights are streamed */
#define MOST_ROWS 512   /* of a block, */
#define BLOCK_BYTES (1L << 20)
#define LAY_OUT 2048  /* columns from which on rows are laid out as tiles */
#define LONG_OUTPUT (1L << 20) /* elements of a result that will not be in the caches when it is read */

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

/* One k-step of 32 rows (`two`), or the upper 16, x 32 columns. */
INLINE void step(const char *top, const char *bottom, const char *weight, long stride, const int two) {
    TILE_LOAD(6, weight, 64);
    TILE_LOAD(4, top, stride);
    if (two) TILE_LOAD(5, bottom, stride);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, weight + 1024, 64);
    if (two) TILE_DOT(2, 5, 6);
    TILE_DOT(1, 4, 7);
    if (two) TILE_DOT(3, 5, 7);
}

/* Where a block's rows are read: 32 of them every `high` bytes, their rows every `row`, their k-steps every `step`. */
typedef struct {
    const char *at;
    long high, row, step;
} Rows;

static void stream_two_high(const char *x, const char *weight, long steps, long stride, long next, float *acc) {
    FOUR(CLEAR);
    for (long s = 0; s < steps; s++, x += next, weight += STEP_BYTES) {
        ask_for(weight + AHEAD, STEP_BYTES);
        step(x, x + 16 * stride, weight, stride, 1);
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

/* The few rows' results in one panel. */
static void do_few(const Gemm *g, const Rows *x, long panel) {
    _Alignas(64) float acc[32 * PANEL];
    long steps = ceil_div(g->k, 32);
    const char *weight = g->weight + panel * steps * STEP_BYTES;
    if (g->t > 16) stream_two_high(x->at, weight, steps, x->row, x->step, acc);
    else stream_one_high(x->at, weight, steps, x->row, acc);
    put_block(g, acc, 0, g->t, panel);
}

/* Many rows: a core takes a block of them, laid out as tiles once, and lets the weights pass by. */

typedef struct {
    char *tiles; /* of x: [32 rows][k-steps][2 tiles], zeros where there is no x */
    float *acc;  /* [32 rows][4 tiles] fp32 */
    size_t bytes;
} Room;

/* A thread's own, kept for the next product; no room: NULL. */
static Room *room_here(long rows, long steps) {
    static _Thread_local Room room;
    size_t tiles = rows * steps * 64, acc = rows * PANEL * 4;
    if (tiles + acc > room.bytes) {
        free(room.tiles);
        room.tiles = aligned_alloc(64, tiles + acc);
        room.bytes = room.tiles ? tiles + acc : 0;
    }
    room.acc = (float *)(room.tiles + tiles);
    return room.tiles ? &room : NULL;
}

/* As many rows as leave the second-level cache room for the weights. */
static long rows_each(long steps) { return at_least(least(BLOCK_BYTES / (steps * 64) / 32 * 32, MOST_ROWS), 64); }

INLINE __m512i part_of_row(const Gemm *g, long row, long step) {
    long left = g->k - step * 32;
    __mmask32 there = row >= g->t || left <= 0 ? 0 : left >= 32 ? 0xffffffffu : (1u << left) - 1;
    return _mm512_maskz_loadu_epi16(there, g->x + (row * g->k + step * 32) * 2);
}

static void take_rows(const Gemm *g, long row, long rows, long steps, char *to) {
    for (long r = 0; r < rows; r += 32)
        for (long s = 0; s < steps; s += 4)
            for (long i = 0; i < 32; i++) {
                char *at = to + (r * steps + s * 32) * 64 + i * 64;
                if (row + r + i < g->t)
                    for (long ahead = 4; ahead < 8; ahead++)
                        __builtin_prefetch(g->x + ((row + r + i) * g->k + (s + ahead) * 32) * 2, 0, 3);
                for (long j = s; j < least(s + 4, steps); j++, at += STEP_BYTES)
                    _mm512_store_si512(at, part_of_row(g, row + r + i, j));
            }
}

#define HERE(what, two)                  \
    do {                                 \
        what(0, acc, 64);                \
        what(1, acc + 256, 64);          \
        if (two) what(2, acc + 512, 64); \
        if (two) what(3, acc + 768, 64); \
    } while (0)

/* 32 rows (`two`), or the upper 16, through one chunk of K; `next`: the weights of the next chunk, of which each step asks
 * for `share` bytes. */
INLINE void chunk(const Rows *x, const char *at, const char *weight, long steps, float *acc, int first, const char *next,
                  long share, const int two) {
    if (first) HERE(CLEAR, two);
    else HERE(TILE_LOAD, two);
    for (long s = 0; s < steps; s++, at += x->step, weight += STEP_BYTES, next += share) {
        for (long i = 0; i < share; i += 64) __builtin_prefetch(next + i, 0, 3);
        step(at, at + 16 * x->row, weight, x->row, two);
    }
    HERE(TILE_STORE, two);
}

/* Rows of whole lines that nobody reads soon go past the caches: fetching the lines first would cost as much again. */
static void put_lines(const Gemm *g, const float *acc, long row, long rows, long panel) {
    for (long r = 0; r < rows; r++) {
        const float *at = acc + r / 16 * 512 + r % 16 * 16;
        __m512i line = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(at + 256), _mm512_load_ps(at));
        _mm512_stream_si512((void *)(g->out + ((row + r) * g->n + panel * PANEL) * 2), line);
    }
}

static void put_tiles(const Gemm *g, const float *acc, long row, long rows, long panel) {
    _Alignas(64) float lines[32 * PANEL];
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < PANEL; j += 16)
            _mm512_store_ps(lines + r * PANEL + j, _mm512_load_ps(acc + r / 16 * 512 + j * 16 + r % 16 * 16));
    put_block(g, lines, row, rows, panel);
}

static int whole_lines(const Gemm *g) {
    return g->out_bf16 && !g->bias && g->n % PANEL == 0 && (uintptr_t)g->out % 64 == 0 && g->t * g->n > LONG_OUTPUT;
}

/* Laying rows out pays when many panels pass by more than one tile of them, and is needed where many do not fill whole
 * tiles; few that are not laid out were padded, if need be (room: NULL). */
static int lays_out(const Gemm *g) { return g->t > FEW || (g->t > 16 && g->n >= LAY_OUT); }

static Rows rows_of(const Gemm *g, long row, long rows, const Room *room) {
    long steps = ceil_div(g->k, 32);
    if (!room) return (Rows){g->x, 0, 2 * g->lda, 64};
    if (g->n < LAY_OUT && g->k % 32 == 0 && row + ceil_div(rows, 16) * 16 <= g->t)
        return (Rows){g->x + row * g->k * 2, 64 * g->k, 2 * g->k, 64};
    take_rows(g, row, ceil_div(rows, 32) * 32, steps, room->tiles);
    return (Rows){room->tiles, steps * STEP_BYTES, 64, STEP_BYTES};
}

/* A block of rows' results in one panel. */
static void do_many(const Gemm *g, const Rows *x, const Room *room, long row, long rows, long panel) {
    long steps = ceil_div(g->k, 32), high = ceil_div(rows, 32), share = ceil_div(STEP_BYTES, high * 64) * 64;
    int lines = whole_lines(g);
    for (long s = 0; s < steps; s += CHUNK)
        for (long r = 0; r < high; r++) {
            const char *weight = g->weight + (panel * steps + s) * STEP_BYTES, *at = x->at + r * x->high + s * x->step;
            const char *next = weight + CHUNK * (STEP_BYTES + r * share);
            float *acc = room->acc + r * 32 * PANEL;
            long here = least(32, rows - r * 32), some = least(CHUNK, steps - s);
            if (here > 16) chunk(x, at, weight, some, acc, s == 0, next, share, 1);
            else chunk(x, at, weight, some, acc, s == 0, next, share, 0);
            if (s + CHUNK < steps) continue;
            (lines ? put_lines : put_tiles)(g, acc, row + r * 32, here, panel);
        }
}

/* Returns whether a thread had no room for its rows. */
static int walk(const Gemm *g, int threads) {
    int many = g->t > FEW, lay = lays_out(g), failed = 0;
    long steps = ceil_div(g->k, 32), panels = ceil_div(g->n, PANEL), blocks = many ? ceil_div(g->t, rows_each(steps)) : 1;
    long each = ceil_div(ceil_div(g->t, blocks), 32) * 32;
    Share shares[threads];
    share_out(shares, ceil_div(g->t, each) * panels, threads);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        Room *room = lay ? room_here(each, steps) : NULL;
        Rows x; /* of the block of rows that begins at `taken` */
        long unit, taken = -1;
        shape_rows(many || g->t > 16 ? 16 : g->t, many ? 16 : at_least(g->t - 16, 1));
        failed = lay && !room;
        while (!failed && (unit = take_unit(shares, omp_get_thread_num(), threads)) >= 0) {
            long row = unit / panels * each, rows = least(each, g->t - row);
            if (row != taken) x = rows_of(g, taken = row, rows, room);
            if (many) do_many(g, &x, room, row, rows, unit % panels);
            else do_few(g, &x, unit);
        }
        _mm_sfence();
        tiles_release();
    }
    return failed;
}

/* A few rows with zeros behind each and below them, to whole tiles: tiles read nothing else. */
static char *padded_rows(const Gemm *g) {
    long row = ceil_div(g->k, 32) * 64, rows = ceil_div(g->t, 32) * 32;
    char *copy = aligned_alloc(64, rows * row);
    if (!copy) return NULL;
    memset(copy, 0, rows * row);
    for (long i = 0; i < g->t; i++) memcpy(copy + i * row, g->x + 2 * i * g->k, 2 * g->k);
    return copy;
}

/* Returns 0, or 1 when memory could not be had. */
__attribute__((visibility("default"))) int gemm_bf16_amx(const char *x, const char *weight, const float *bias, char *out,
                                                         long t, long n, long k, int out_bf16, int threads) {
    Gemm g = {x, weight, bias, out, t, n, k, k, out_bf16};
    if (!t) return 0;
    char *copy = NULL;
    if (!lays_out(&g) && k % 32) {
        copy = padded_rows(&g);
        if (!copy) return 1;
        g.x = copy, g.lda = ceil_div(k, 32) * 32;
    }
    int failed = walk(&g, threads_for(&g, threads, 2));
    free(copy);
    return failed;
}
