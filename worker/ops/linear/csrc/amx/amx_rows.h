/* Tiles of rows and weights: the parts of the AMX matmul that plain weights and codes share. */
#pragma once
#define SUFFIX amx
#define HAS_TILES
#include "buffers.h"
#include "unpack_bf16.h"
#include "amx_tiles.h"

#define PREFETCH_DISTANCE 1024 /* how many bytes ahead a streamed weight is prefetched */
#define CHUNK_STEPS 8          /* k-steps of a chunk: their weights stay in the L1 cache */
#define CHUNK_BYTES (CHUNK_STEPS * K_STEP_BYTES)
#define MAX_STREAMED_ROWS 32   /* with more rows, weights are not streamed */
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

#define EACH_ACCUMULATOR(what, two_tiles)                             \
    do {                                                              \
        what(0, acc, 4 * PANEL);                                      \
        what(1, acc + 16, 4 * PANEL);                                 \
        if (two_tiles) what(2, acc + 16 * PANEL, 4 * PANEL);          \
        if (two_tiles) what(3, acc + 16 * PANEL + 16, 4 * PANEL);     \
    } while (0)
#define ZERO_TILE(tile, p, stride) TILE_ZERO(tile)

/* Computes one k-step of 32 columns for 32 rows (`two_tiles`), or for only the first 16 rows. */
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

/* The addresses of a block of rows. The strides are bytes from 32 rows to the next 32, from row to row, and from k-step
 * to k-step. */
typedef struct {
    const char *base;
    long block_stride, row_stride, step_stride;
} RowLayout;

INLINE void stream_32_rows(const RowLayout *x, const char *at, const char *weight, long steps, long prefetch) {
    for (long s = 0; s < steps; s++, at += x->step_stride, weight += K_STEP_BYTES) {
        prefetch_weights(weight + PREFETCH_DISTANCE, prefetch);
        step(at, at + 16 * x->row_stride, weight, x->row_stride, 1);
    }
}

INLINE void stream_16_rows(const RowLayout *x, const char *at, const char *weight, long steps, long prefetch) {
    for (long s = 0; s < steps; s++, at += x->step_stride, weight += K_STEP_BYTES) {
        prefetch_weights(weight + PREFETCH_DISTANCE, prefetch);
        TILE_LOAD(4, at, x->row_stride);
        TILE_LOAD(6, weight, 64);
        TILE_LOAD(7, weight + 1024, 64);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
    }
}

#define EACH_TILE(what, tiles, two_tiles)        \
    do {                                         \
        what(0, tiles, 64);                      \
        what(1, tiles + 256, 64);                \
        if (two_tiles) what(2, tiles + 512, 64); \
        if (two_tiles) what(3, tiles + 768, 64); \
    } while (0)

/* Multiplies 32 rows (`two_tiles`), or only the first 16, by one chunk of K. Sums start from zero (`first`) or from
 * `acc` and are stored in `to`. Every step prefetches `prefetch_bytes` bytes of `next`, the weights of the next
 * chunk. */
INLINE void multiply_chunk(const RowLayout *x, const char *at, const char *weight, long steps, float *acc, float *to,
                           int first, const char *next, long prefetch_bytes, const int two_tiles) {
    if (first)
        EACH_TILE(ZERO_TILE, acc, two_tiles);
    else
        EACH_TILE(TILE_LOAD, acc, two_tiles);
    for (long s = 0; s < steps; s++, at += x->step_stride, weight += K_STEP_BYTES, next += prefetch_bytes) {
        for (long i = 0; i < prefetch_bytes; i += 64) __builtin_prefetch(next + i, 0, 3);
        step(at, at + 16 * x->row_stride, weight, x->row_stride, two_tiles);
    }
    EACH_TILE(TILE_STORE, to, two_tiles);
}

/* Stores whole cache lines directly to memory. Nothing reads them soon, and fetching them into the caches first would
 * double the memory traffic. */
static void store_past_caches(const Gemm *g, const float *acc, long row, long rows, long panel) {
    for (long r = 0; r < rows; r++) {
        const float *at = acc + r / 16 * 512 + r % 16 * 16;
        __m512i line = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(at + 256), _mm512_load_ps(at));
        _mm512_stream_si512((void *)(g->out + ((row + r) * g->ldo + panel * PANEL) * 2), line);
    }
}

/* Returns the index, in the floats of four stored tiles, of a row's sums for one half of a panel. */
INLINE long place_in_tiles(long row, long half) { return row / 16 * 512 + half * 256 + row % 16 * 16; }

static void copy_from_tiles(const float *acc, long rows, float *lines) {
    for (long r = 0; r < rows; r++)
        for (long half = 0; half < 2; half++)
            _mm512_store_ps(lines + r * PANEL + half * 16, _mm512_load_ps(acc + place_in_tiles(r, half)));
}

static void store_tiles(const Gemm *g, const float *acc, long row, long rows, long panel) {
    _Alignas(64) float lines[32 * PANEL];
    copy_from_tiles(acc, rows, lines);
    store_block(g, lines, row, rows, panel);
}

static int can_bypass_caches(const Gemm *g) {
    return g->out_bf16 && !g->weight->bias && g->n % PANEL == 0 && g->ldo % PANEL == 0 && (uintptr_t)g->out % 64 == 0 &&
           g->t * g->n > MIN_STREAMING_ELEMENTS;
}
