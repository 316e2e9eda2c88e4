/* bf16 matmul on AMX tiles. Weights are packed in panels of 32 columns: [N/32][K/32][2 tiles][16 pairs][16 columns][2].
 *
 * Four accumulator tiles (32 rows x 32 columns) add the k-steps in order. With up to 32 rows, the weights are read
 * once, the accumulators stay in tiles over all of K, and tiles are only as high as there are rows. With more rows,
 * blocks of rows are repacked as tiles, K is cut into chunks whose weights fit in the L1 cache, and accumulators are
 * stored in fp32 between chunks, which changes no bit. So a row has the same bits alone and among a thousand rows. */
#define SUFFIX amx
#include "gemm/gemm.h"
#include "gemm/unpack_bf16.h"
#include "work_sharing.h"
#include "amx_tiles.h"

#define PREFETCH_DISTANCE 8192 /* bytes ahead of use at which a weight is prefetched when it is streamed */
#define CHUNK_STEPS 8          /* k-steps of a chunk: their weights stay in the L1 cache */
#define MAX_STREAMED_ROWS 32   /* weights are streamed if there are at most so many rows */
#define MAX_BLOCK_ROWS 512     /* the most rows of a block */
#define BLOCK_BYTES (1L << 20) /* the most bytes of a block that has more than 64 rows */
#define MIN_REPACK_COLUMNS 2048           /* rows are repacked as tiles if there are so many columns or more */
#define MIN_STREAMING_ELEMENTS (1L << 20) /* larger results leave the caches before they are read */

static void configure_tiles(long top, long bottom) {
    TileConfig s = {.palette = 1};
    for (int i = 0; i < 8; i++) s.bytes[i] = 64, s.rows[i] = 16;
    s.rows[0] = s.rows[1] = s.rows[4] = top;
    s.rows[2] = s.rows[3] = s.rows[5] = bottom;
    tiles_configure(&s);
}

INLINE void prefetch_weights(const char *weight, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(weight + i, 0, 2);
}

#define EACH_ACCUMULATOR(what)                     \
    do {                                           \
        what(0, acc, 4 * PANEL);                   \
        what(1, acc + 16, 4 * PANEL);              \
        what(2, acc + 16 * PANEL, 4 * PANEL);      \
        what(3, acc + 16 * PANEL + 16, 4 * PANEL); \
    } while (0)
#define ZERO_TILE(tile, p, stride) TILE_ZERO(tile)

/* Computes one k-step of 32 columns for 32 rows (`two_tiles`), or for the upper 16 of them. */
INLINE void step(const char *top, const char *bottom, const char *weight, long stride, const int two_tiles) {
    TILE_LOAD(6, weight, 64);
    TILE_LOAD(4, top, stride);
    if (two_tiles) TILE_LOAD(5, bottom, stride);
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, weight + 1024, 64);
    if (two_tiles) TILE_DOT(2, 5, 6);
    TILE_DOT(1, 4, 7);
    if (two_tiles) TILE_DOT(3, 5, 7);
}

/* Where the rows of a block are in memory. The strides are bytes: of 32 rows, of one row, of one k-step. */
typedef struct {
    const char *base;
    long block_stride, row_stride, step_stride;
} RowLayout;

INLINE void stream_32_rows(const char *x, const char *weight, long steps, long stride, long next, int prefetch) {
    for (long s = 0; s < steps; s++, x += next, weight += K_STEP_BYTES) {
        if (prefetch) prefetch_weights(weight + PREFETCH_DISTANCE, K_STEP_BYTES);
        step(x, x + 16 * stride, weight, stride, 1);
    }
}

INLINE void stream_16_rows(const char *x, const char *weight, long steps, long stride, int prefetch) {
    for (long s = 0; s < steps; s++, x += 64, weight += K_STEP_BYTES) {
        if (prefetch) prefetch_weights(weight + PREFETCH_DISTANCE, K_STEP_BYTES);
        TILE_LOAD(4, x, stride);
        TILE_LOAD(6, weight, 64);
        TILE_LOAD(7, weight + 1024, 64);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
    }
}

/* Computes one panel for a few rows. The accumulators stay in tiles over all of K; weights of codes are unpacked chunk
 * by chunk to `buffer`. */
static void multiply_streamed(const Gemm *g, const RowLayout *x, long panel) {
    _Alignas(64) float acc[32 * PANEL];
    _Alignas(64) char buffer[CHUNK_STEPS * K_STEP_BYTES];
    int plain = g->weight->kind == PLAIN;
    long steps = ceil_div(g->k, 32), chunk = plain ? steps : CHUNK_STEPS;
    EACH_ACCUMULATOR(ZERO_TILE);
    for (long s = 0; s < steps; s += chunk) {
        const char *weight = bf16_steps(g->weight, panel, s, min_long(chunk, steps - s), buffer);
        const char *at = x->base + s * x->step_stride;
        if (g->t > 16)
            stream_32_rows(at, weight, min_long(chunk, steps - s), x->row_stride, x->step_stride, plain);
        else
            stream_16_rows(at, weight, min_long(chunk, steps - s), x->row_stride, plain);
    }
    EACH_ACCUMULATOR(TILE_STORE);
    store_block(g, acc, 0, g->t, panel);
}

/* With many rows, a core repacks a block of rows as tiles once, and then reads the weights panel by panel. */

typedef struct {
    char *tiles; /* x as [32 rows][k-steps][2 tiles], padded with zeros */
    float *acc;  /* [32 rows][4 tiles] fp32 */
    char *chunk; /* unpacked weights of a chunk */
    size_t bytes;
} ThreadBuffers;

/* Returns this thread's buffers, which are kept for the next matmul, or NULL when memory is exhausted. */
static ThreadBuffers *thread_buffers(long rows, long steps) {
    static _Thread_local ThreadBuffers buffers;
    size_t tiles = rows * steps * 64, acc = rows * PANEL * 4, bytes = tiles + acc + CHUNK_STEPS * K_STEP_BYTES;
    if (bytes > buffers.bytes) {
        free(buffers.tiles);
        buffers.tiles = aligned_alloc(64, bytes);
        buffers.bytes = buffers.tiles ? bytes : 0;
    }
    buffers.acc = (float *)(buffers.tiles + tiles);
    buffers.chunk = buffers.tiles + tiles + acc;
    return buffers.tiles ? &buffers : NULL;
}

/* Returns the largest number of rows that leaves space for the weights in the L2 cache. */
static long rows_per_block(long steps) {
    return max_long(min_long(BLOCK_BYTES / (steps * 64) / 32 * 32, MAX_BLOCK_ROWS), 64);
}

INLINE __m512i load_k_step(const Gemm *g, long row, long step) {
    long left = g->k - step * 32;
    __mmask32 there = row >= g->t || left <= 0 ? 0 : left >= 32 ? 0xffffffffu : (1u << left) - 1;
    return _mm512_maskz_loadu_epi16(there, g->x + (row * g->k + step * 32) * 2);
}

static void repack_rows(const Gemm *g, long row, long rows, long steps, char *to) {
    for (long r = 0; r < rows; r += 32)
        for (long s = 0; s < steps; s += 4)
            for (long i = 0; i < 32; i++) {
                char *at = to + (r * steps + s * 32) * 64 + i * 64;
                if (row + r + i < g->t)
                    for (long ahead = 4; ahead < 8; ahead++)
                        __builtin_prefetch(g->x + ((row + r + i) * g->k + (s + ahead) * 32) * 2, 0, 3);
                for (long j = s; j < min_long(s + 4, steps); j++, at += K_STEP_BYTES)
                    _mm512_store_si512(at, load_k_step(g, row + r + i, j));
            }
}

#define EACH_TILE(what, two_tiles)             \
    do {                                       \
        what(0, acc, 64);                      \
        what(1, acc + 256, 64);                \
        if (two_tiles) what(2, acc + 512, 64); \
        if (two_tiles) what(3, acc + 768, 64); \
    } while (0)

/* Multiplies 32 rows (`two_tiles`), or the upper 16, by one chunk of K. Every step prefetches `prefetch_bytes` of
 * `next`, the weights of the next chunk. */
INLINE void multiply_chunk(const RowLayout *x, const char *at, const char *weight, long steps, float *acc, int first,
                           const char *next, long prefetch_bytes, const int two_tiles) {
    if (first)
        EACH_TILE(ZERO_TILE, two_tiles);
    else
        EACH_TILE(TILE_LOAD, two_tiles);
    for (long s = 0; s < steps; s++, at += x->step_stride, weight += K_STEP_BYTES, next += prefetch_bytes) {
        for (long i = 0; i < prefetch_bytes; i += 64) __builtin_prefetch(next + i, 0, 3);
        step(at, at + 16 * x->row_stride, weight, x->row_stride, two_tiles);
    }
    EACH_TILE(TILE_STORE, two_tiles);
}

/* Stores whole cache lines directly to memory: nothing reads them soon, and fetching them into the caches would double
 * the traffic. */
static void store_past_caches(const Gemm *g, const float *acc, long row, long rows, long panel) {
    for (long r = 0; r < rows; r++) {
        const float *at = acc + r / 16 * 512 + r % 16 * 16;
        __m512i line = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(at + 256), _mm512_load_ps(at));
        _mm512_stream_si512((void *)(g->out + ((row + r) * g->ldo + panel * PANEL) * 2), line);
    }
}

static void store_tiles(const Gemm *g, const float *acc, long row, long rows, long panel) {
    _Alignas(64) float lines[32 * PANEL];
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < PANEL; j += 16)
            _mm512_store_ps(lines + r * PANEL + j, _mm512_load_ps(acc + r / 16 * 512 + j * 16 + r % 16 * 16));
    store_block(g, lines, row, rows, panel);
}

static int can_bypass_caches(const Gemm *g) {
    return g->out_bf16 && !g->weight->bias && g->n % PANEL == 0 && g->ldo % PANEL == 0 && (uintptr_t)g->out % 64 == 0 &&
           g->t * g->n > MIN_STREAMING_ELEMENTS;
}

/* Whether to repack rows as tiles. Repacking pays for itself when many panels read more than one tile of rows, and is
 * needed when many rows do not fill whole tiles. A few rows are padded instead, where K is not a multiple of 32. */
static int repacks(const Gemm *g) { return g->t > MAX_STREAMED_ROWS || (g->t > 16 && g->n >= MIN_REPACK_COLUMNS); }

static RowLayout layout_rows(const Gemm *g, long row, long rows, const ThreadBuffers *buffers) {
    long steps = ceil_div(g->k, 32);
    if (!buffers) return (RowLayout){g->x, 0, 2 * g->lda, 64};
    if (g->n < MIN_REPACK_COLUMNS && g->k % 32 == 0 && row + ceil_div(rows, 16) * 16 <= g->t)
        return (RowLayout){g->x + row * g->k * 2, 64 * g->k, 2 * g->k, 64};
    repack_rows(g, row, ceil_div(rows, 32) * 32, steps, buffers->tiles);
    return (RowLayout){buffers->tiles, steps * K_STEP_BYTES, 64, K_STEP_BYTES};
}

/* Computes one panel for a block of rows. */
static void multiply_blocked(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long row, long rows,
                             long panel) {
    long steps = ceil_div(g->k, 32), high = ceil_div(rows, 32), prefetch_bytes = ceil_div(K_STEP_BYTES, high * 64) * 64;
    int bypass = can_bypass_caches(g), plain = g->weight->kind == PLAIN;
    for (long s = 0; s < steps; s += CHUNK_STEPS) {
        long some = min_long(CHUNK_STEPS, steps - s);
        const char *weight = bf16_steps(g->weight, panel, s, some, buffers->chunk);
        for (long r = 0; r < high; r++) {
            const char *at = x->base + r * x->block_stride + s * x->step_stride;
            const char *next = plain ? weight + CHUNK_STEPS * (K_STEP_BYTES + r * prefetch_bytes) : weight;
            float *acc = buffers->acc + r * 32 * PANEL;
            long here = min_long(32, rows - r * 32);
            if (here > 16)
                multiply_chunk(x, at, weight, some, acc, s == 0, next, prefetch_bytes, 1);
            else
                multiply_chunk(x, at, weight, some, acc, s == 0, next, prefetch_bytes, 0);
            if (s + CHUNK_STEPS < steps) continue;
            (bypass ? store_past_caches : store_tiles)(g, acc, row + r * 32, here, panel);
        }
    }
}

/* Returns whether memory for some thread's buffers was exhausted. */
static int multiply_rows(const Gemm *g, int threads) {
    int many = g->t > MAX_STREAMED_ROWS, repack = repacks(g), failed = 0;
    long steps = ceil_div(g->k, 32), panels = ceil_div(g->n, PANEL),
         blocks = many ? ceil_div(g->t, rows_per_block(steps)) : 1;
    long block_rows = ceil_div(ceil_div(g->t, blocks), 32) * 32;
    WorkRange ranges[threads];
    split_work(ranges, ceil_div(g->t, block_rows) * panels, threads);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        ThreadBuffers *buffers = repack ? thread_buffers(block_rows, steps) : NULL;
        RowLayout x; /* layout of the block that starts at `loaded_row` */
        long unit, loaded_row = -1;
        configure_tiles(many || g->t > 16 ? 16 : g->t, many ? 16 : max_long(g->t - 16, 1));
        failed = repack && !buffers;
        while (!failed && (unit = take_unit(ranges, omp_get_thread_num(), threads)) >= 0) {
            long row = unit / panels * block_rows, rows = min_long(block_rows, g->t - row);
            if (row != loaded_row) x = layout_rows(g, loaded_row = row, rows, buffers);
            if (many)
                multiply_blocked(g, &x, buffers, row, rows, unit % panels);
            else
                multiply_streamed(g, &x, unit);
        }
        _mm_sfence();
        tiles_release();
    }
    return failed;
}

/* Returns a copy of a few rows, padded with zeros in both directions to whole tiles. */
static char *pad_rows(const Gemm *g) {
    long row = ceil_div(g->k, 32) * 64, rows = ceil_div(g->t, 32) * 32;
    char *copy = aligned_alloc(64, rows * row);
    if (!copy) return NULL;
    memset(copy, 0, rows * row);
    for (long i = 0; i < g->t; i++) memcpy(copy + i * row, g->x + 2 * i * g->k, 2 * g->k);
    return copy;
}

/* Returns 0, or 1 when memory is exhausted. */
static int multiply(Gemm *g, int threads) {
    char *copy = NULL;
    if (!repacks(g) && g->k % 32) {
        copy = pad_rows(g);
        if (!copy) return 1;
        g->x = copy, g->lda = ceil_div(g->k, 32) * 32;
    }
    int failed = multiply_rows(g, threads);
    free(copy);
    return failed;
}

GEMM(bf16, 1, multiply)
