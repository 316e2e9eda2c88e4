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

#define EACH_ACCUMULATOR(what, two_tiles)                             \
    do {                                                              \
        what(0, acc, 4 * PANEL);                                      \
        what(1, acc + 16, 4 * PANEL);                                 \
        if (two_tiles) what(2, acc + 16 * PANEL, 4 * PANEL);          \
        if (two_tiles) what(3, acc + 16 * PANEL + 16, 4 * PANEL);     \
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

/* A thread's copy of a block of rows (if it repacks them) and its chunk of unpacked weights (if there are any). */
typedef struct {
    char *chunk;
    float *acc, *total, *input_sums; /* acc, total: [32 rows][4 tiles], or [rows][32] for a few rows */
    char *tiles;                     /* x as [32 rows][k-steps][2 tiles], padded with zeros */
    size_t bytes;
} ThreadBuffers;

/* Returns this thread's buffers, which are kept for the next matmul, or NULL when memory is exhausted. */
static ThreadBuffers *thread_buffers(const Gemm *g, long rows, long steps) {
    static _Thread_local ThreadBuffers buffers;
    size_t chunk = CHUNK_STEPS * K_STEP_BYTES, acc = rows * PANEL, sums = input_sums_size(g, rows);
    size_t bytes = chunk + (2 * acc + sums) * sizeof(float) + rows * steps * 64;
    if (bytes > buffers.bytes) {
        free(buffers.chunk);
        buffers.chunk = aligned_alloc(64, bytes);
        buffers.bytes = buffers.chunk ? bytes : 0;
    }
    buffers.acc = (float *)(buffers.chunk + chunk);
    buffers.total = buffers.acc + acc;
    buffers.input_sums = buffers.total + acc;
    buffers.tiles = (char *)(buffers.input_sums + sums);
    return buffers.chunk ? &buffers : NULL;
}

/* The unpacked k-steps of one chunk, and where its groups are. A step holds 32 inputs, or 16 if groups have 16. */
typedef struct {
    long inputs_per_step, group_steps, count; /* count: steps of the whole panel */
} CodeSteps;

INLINE CodeSteps code_steps(const Gemm *g) {
    long inputs = g->weight->group == CODE_BLOCK ? CODE_BLOCK : 32;
    return (CodeSteps){inputs, g->weight->group / inputs, ceil_div(g->k, inputs)};
}

/* Unpacks `steps` steps from `step` on, and one more if an odd number of steps holds 16 inputs each. */
INLINE void unpack_steps(const Gemm *g, const CodeSteps *c, long panel, long step, long steps, char *to) {
    panel_pairs(g->weight, panel, step * c->inputs_per_step / 32, ceil_div(steps * c->inputs_per_step, 32), to,
                c->inputs_per_step == CODE_BLOCK);
}

/* Returns the rows that a step is multiplied with. */
INLINE const char *rows_of_step(const RowLayout *x, const CodeSteps *c, long step) {
    return x->base + step * c->inputs_per_step / 32 * x->step_stride;
}

/* The part of a group that a chunk holds. */
typedef struct {
    long group, steps;
    int begins, ends;
} GroupPart;

INLINE GroupPart group_part(const Gemm *g, const CodeSteps *c, long step, long chunk_end) {
    long group = min_long(step / c->group_steps, group_count(g->weight) - 1);
    long end = group + 1 == group_count(g->weight) ? c->count : (group + 1) * c->group_steps;
    return (GroupPart){group, min_long(end, chunk_end) - step, step == group * c->group_steps, end <= chunk_end};
}

INLINE void stream_32_rows(const char *x, const char *weight, long steps, long stride, long next, long prefetch) {
    for (long s = 0; s < steps; s++, x += next, weight += K_STEP_BYTES) {
        prefetch_weights(weight + PREFETCH_DISTANCE, prefetch);
        step(x, x + 16 * stride, weight, stride, 1);
    }
}

INLINE void stream_16_rows(const char *x, const char *weight, long steps, long stride, long prefetch) {
    for (long s = 0; s < steps; s++, x += 64, weight += K_STEP_BYTES) {
        prefetch_weights(weight + PREFETCH_DISTANCE, prefetch);
        TILE_LOAD(4, x, stride);
        TILE_LOAD(6, weight, 64);
        TILE_LOAD(7, weight + 1024, 64);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
    }
}

/* Computes one panel for a few rows. The accumulators stay in tiles over all of K. */
static void multiply_streamed(const Gemm *g, const RowLayout *x, long panel) {
    _Alignas(64) float acc[32 * PANEL];
    long steps = ceil_div(g->k, 32);
    const char *weight = panel_pairs(g->weight, panel, 0, steps, NULL, 0);
    EACH_ACCUMULATOR(ZERO_TILE, g->t > 16);
    if (g->t > 16)
        stream_32_rows(x->base, weight, steps, x->row_stride, x->step_stride, K_STEP_BYTES);
    else
        stream_16_rows(x->base, weight, steps, x->row_stride, K_STEP_BYTES);
    EACH_ACCUMULATOR(TILE_STORE, g->t > 16);
    store_block(g, acc, 0, g->t, panel);
}

/* Adds the sums of a group in acc [rows][32] to the total. */
static void add_group_rows(const GroupEnd *end, const float *acc, float *total, long rows) {
    for (int j = 0; j < 2; j++) {
        vf scale = load_scales(end->weight, end->head, j * 16), minimum = broadcast(0);
        if (end->weight->has_minimum) minimum = load_minimums(end->weight, end->head, j * 16);
        for (long r = 0; r < rows; r++) {
            long at = r * PANEL + j * 16;
            store_f32(total + at, add_group(load_f32(total + at), load_f32(acc + at), scale, minimum, end, r));
        }
    }
}

/* Computes one panel of codes for a few rows. The accumulators stay in tiles over a group. The sums of a group are added
 * while the tiles compute the next one: what tiles store cannot be read at once. */
static void multiply_streamed_codes(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long panel) {
    CodeSteps c = code_steps(g);
    _Alignas(64) float sums[2][32 * PANEL], total[32 * PANEL];
    long complete = 0; /* groups that have ended */
    GroupEnd ends[2];
    memset(total, 0, g->t * PANEL * sizeof(float));
    for (long s = 0; s < c.count; s += CHUNK_STEPS) {
        long chunk_end = min_long(s + CHUNK_STEPS, c.count);
        unpack_steps(g, &c, panel, s, chunk_end - s, buffers->chunk);
        for (long at = s; at < chunk_end;) {
            GroupPart part = group_part(g, &c, at, chunk_end);
            const char *weight = buffers->chunk + (at - s) * K_STEP_BYTES;
            if (part.begins) EACH_ACCUMULATOR(ZERO_TILE, g->t > 16);
            for (long i = 0; i < part.steps; i++, weight += K_STEP_BYTES) {
                if (g->t > 16)
                    stream_32_rows(rows_of_step(x, &c, at + i), weight, 1, x->row_stride, x->step_stride, 0);
                else
                    stream_16_rows(rows_of_step(x, &c, at + i), weight, 1, x->row_stride, 0);
            }
            at += part.steps;
            if (!part.ends) break;
            float *acc = sums[complete % 2];
            EACH_ACCUMULATOR(TILE_STORE, g->t > 16);
            if (complete) add_group_rows(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, g->t);
            ends[complete++ % 2] = (GroupEnd){g->weight, group_at(g->weight, panel, part.group),
                                              buffers->input_sums + part.group * g->t};
        }
    }
    add_group_rows(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, g->t);
    store_block(g, total, 0, g->t, panel);
}

/* With many rows, a core repacks a block of rows as tiles once, and then reads the weights panel by panel. */

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

#define EACH_TILE(what, tiles, two_tiles)        \
    do {                                         \
        what(0, tiles, 64);                      \
        what(1, tiles + 256, 64);                \
        if (two_tiles) what(2, tiles + 512, 64); \
        if (two_tiles) what(3, tiles + 768, 64); \
    } while (0)

/* Multiplies 32 rows (`two_tiles`), or the upper 16, by one chunk of K. It adds to zero (`first`) or to `acc`, and stores
 * the result in `to`. Every step prefetches `prefetch_bytes` of `next`, the weights of the next chunk. */
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

/* Adds the sums of a group in acc [4 tiles] to the total. */
static void add_group_tiles(const GroupEnd *end, const float *acc, float *total, long rows) {
    for (int tile = 0; tile < (rows > 16 ? 4 : 2); tile++) {
        vf scale = load_scales(end->weight, end->head, tile % 2 * 16), minimum = broadcast(0);
        if (end->weight->has_minimum) minimum = load_minimums(end->weight, end->head, tile % 2 * 16);
        for (long r = 0; r < min_long(16, rows - tile / 2 * 16); r++) {
            long at = tile * 256 + r * 16;
            store_f32(total + at, add_group(load_f32(total + at), load_f32(acc + at), scale, minimum, end,
                                            tile / 2 * 16 + r));
        }
    }
}

/* Multiplies 32 rows, or fewer, by the unpacked steps [s, chunk_end) of a panel, group by group. The sums of a group are
 * added while the tiles compute the next one: what tiles store cannot be read at once. */
static void multiply_code_chunk(const Gemm *g, const CodeSteps *c, const RowLayout *x, const ThreadBuffers *buffers,
                                long panel, long s, long chunk_end, long r, long rows) {
    long here = min_long(32, rows - r * 32), complete = 0; /* complete: groups that ended in this chunk */
    _Alignas(64) float sums[2][32 * PANEL];
    float *unfinished = buffers->acc + r * 32 * PANEL, *total = buffers->total + r * 32 * PANEL;
    GroupEnd ends[2];
    for (long at = s; at < chunk_end;) {
        GroupPart part = group_part(g, c, at, chunk_end);
        const char *from = rows_of_step(x, c, at) + r * x->block_stride;
        const char *weight = buffers->chunk + (at - s) * K_STEP_BYTES;
        float *to = part.ends ? sums[complete % 2] : unfinished;
        if (here > 16)
            multiply_chunk(x, from, weight, part.steps, unfinished, to, part.begins, weight, 0, 1);
        else
            multiply_chunk(x, from, weight, part.steps, unfinished, to, part.begins, weight, 0, 0);
        at += part.steps;
        if (!part.ends) break;
        if (complete) add_group_tiles(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, here);
        ends[complete % 2] = (GroupEnd){g->weight, group_at(g->weight, panel, part.group),
                                        buffers->input_sums + part.group * rows + r * 32};
        complete++;
    }
    if (complete) add_group_tiles(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, here);
}

/* Computes one panel of codes for a block of rows. */
static void multiply_blocked_codes(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long row, long rows,
                                   long panel) {
    CodeSteps c = code_steps(g);
    long high = ceil_div(rows, 32);
    int bypass = can_bypass_caches(g);
    memset(buffers->total, 0, high * 32 * PANEL * sizeof(float));
    for (long s = 0; s < c.count; s += CHUNK_STEPS) {
        long chunk_end = min_long(s + CHUNK_STEPS, c.count);
        unpack_steps(g, &c, panel, s, chunk_end - s, buffers->chunk);
        for (long r = 0; r < high; r++) multiply_code_chunk(g, &c, x, buffers, panel, s, chunk_end, r, rows);
    }
    for (long r = 0; r < high; r++)
        (bypass ? store_past_caches : store_tiles)(g, buffers->total + r * 32 * PANEL, row + r * 32,
                                                   min_long(32, rows - r * 32), panel);
}

/* Returns whether memory for some thread's buffers was exhausted. */
static int multiply_rows(const Gemm *g, int threads) {
    int many = g->t > MAX_STREAMED_ROWS, repack = repacks(g), codes = g->weight->kind != PLAIN, failed = 0;
    long steps = ceil_div(g->k, 32), panels = ceil_div(g->n, PANEL),
         blocks = many ? ceil_div(g->t, rows_per_block(steps)) : 1;
    long block_rows = ceil_div(ceil_div(g->t, blocks), 32) * 32;
    WorkRange ranges[threads];
    split_work(ranges, ceil_div(g->t, block_rows) * panels, threads);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        ThreadBuffers *buffers = repack || codes ? thread_buffers(g, block_rows, repack ? steps : 0) : NULL;
        RowLayout x; /* layout of the block that starts at `loaded_row` */
        long unit, loaded_row = -1;
        configure_tiles(many || g->t > 16 ? 16 : g->t, many ? 16 : max_long(g->t - 16, 1));
        failed = (repack || codes) && !buffers;
        while (!failed && (unit = take_unit(ranges, omp_get_thread_num(), threads)) >= 0) {
            long row = unit / panels * block_rows, rows = min_long(block_rows, g->t - row);
            if (row != loaded_row) {
                x = layout_rows(g, loaded_row = row, rows, repack ? buffers : NULL);
                if (input_sums_size(g, rows)) sum_inputs(g, row, rows, buffers->input_sums);
            }
            if (codes)
                (many ? multiply_blocked_codes(g, &x, buffers, row, rows, unit % panels)
                      : multiply_streamed_codes(g, &x, buffers, unit));
            else
                (many ? multiply_blocked(g, &x, buffers, row, rows, unit % panels) : multiply_streamed(g, &x, unit));
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
