/* bf16 matmul on vdpbf16ps: a lane adds the products of a pair of k. Panels of weights are the AMX ones, so a packed weight
 * serves every processor: [N/32][K/32][2 halves][16 pairs][16 columns][2].
 *
 * An element is one chain over the pairs of k in order. The accumulators of up to 12 rows x 32 columns stay in registers,
 * through the whole K where there are no more rows than that. More rows take turns with chunks of K, which the first-level
 * cache keeps; accumulators are put down in between, which loses no bit. */
#include "gemm.h"

#define STEP_BYTES 2048 /* one k-step of a panel */
#define HIGH 12         /* rows whose accumulators, two registers each, fit */
#define CHUNK 8         /* k-steps of a chunk */
#define AHEAD 8192      /* how far ahead of its use a weight is asked for when few rows stream it */
#define MOST_ROWS 512   /* of a thread's item, */
#define BLOCK_BYTES (256L << 10)

/* Rows [0, rows) of an item are cut evenly into `high` strips of at most HIGH rows, laid out as [K/32][rows of it][32]. */
typedef struct {
    long rows, high, steps;
} Strips;

INLINE long strip_row(const Strips *s, long strip) { return strip * s->rows / s->high; }

typedef struct {
    char *x;
    float *acc; /* [rows][32] */
    size_t bytes;
} Room;

/* A thread's own, kept for the next product; no room: NULL. */
static Room *room_here(long rows, long steps) {
    static _Thread_local Room room;
    size_t x = rows * steps * 64, acc = rows * PANEL * 4;
    if (x + acc > room.bytes) {
        free(room.x);
        room.x = aligned_alloc(64, x + acc);
        room.bytes = room.x ? x + acc : 0;
    }
    room.acc = (float *)(room.x + x);
    return room.x ? &room : NULL;
}

/* As many rows as leave the second-level cache room for the weights. */
static long rows_each(long steps) { return at_least(least(BLOCK_BYTES / (steps * 64) / 32 * 32, MOST_ROWS), 64); }

static void take_rows(const Gemm *g, long row, const Strips *s, char *to) {
    long whole = g->k / 32, left = g->k % 32;
    for (long strip = 0, r = 0; strip < s->high; strip++) {
        long end = strip_row(s, strip + 1), rows = end - r;
        for (long i = 0; i < rows; i++, r++) {
            const char *from = g->x + (row + r) * g->k * 2;
            char *at = to + i * 64;
            for (long j = 0; j < whole; j++, from += 64, at += rows * 64)
                _mm512_store_si512(at, _mm512_loadu_si512(from));
            if (left) _mm512_store_si512(at, _mm512_maskz_loadu_epi16((1u << left) - 1, from));
        }
        to += rows * s->steps * 64;
    }
}

/* What is asked for with every pair of k: two lines, `second` bytes apart. */
typedef struct {
    const char *next;
    long each, second;
} Ahead;

/* A strip through some k-steps of a panel; `first`: none came before. */
INLINE void strip_steps(const char *x, const char *weight, long steps, float *acc, int first, Ahead ahead, const int rows) {
    __m512 sum[HIGH][2];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) sum[r][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(acc + r * PANEL + j * 16);
    for (long i = 0; i < steps * 16; i++) {
        const char *w = weight + i / 16 * STEP_BYTES + i % 16 * 64, *at = x + i / 16 * rows * 64 + i % 16 * 4;
        __builtin_prefetch(ahead.next + i * ahead.each, 0, 3);
        __builtin_prefetch(ahead.next + i * ahead.each + ahead.second, 0, 3);
        __m512bh left = (__m512bh)_mm512_load_si512(w), right = (__m512bh)_mm512_load_si512(w + 1024);
        for (int r = 0; r < rows; r++) {
            __m512i pair = _mm512_set1_epi32(*(const int32_t *)(at + r * 64));
            __asm__("" : "+v"(pair)); /* one load for both */
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], (__m512bh)pair, left);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], (__m512bh)pair, right);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) _mm512_store_ps(acc + r * PANEL + j * 16, sum[r][j]);
}

#define STRIP(n) \
    static void strip_of_##n(const char *x, const char *w, long steps, float *acc, int first, Ahead ahead) { \
        strip_steps(x, w, steps, acc, first, ahead, n);                                                     \
    }
STRIP(1) STRIP(2) STRIP(3) STRIP(4) STRIP(5) STRIP(6) STRIP(7) STRIP(8) STRIP(9) STRIP(10) STRIP(11) STRIP(12)

typedef void Strip(const char *, const char *, long, float *, int, Ahead);
static Strip *const strip_of[HIGH + 1] = {
    NULL,       strip_of_1, strip_of_2, strip_of_3, strip_of_4,  strip_of_5,  strip_of_6,
    strip_of_7, strip_of_8, strip_of_9, strip_of_10, strip_of_11, strip_of_12,
};

/* More than one strip ask for the next chunk together; one asks for what it will read itself. */
INLINE Ahead ahead_of(const Strips *s, const char *weight, long strip) {
    if (s->high == 1) return (Ahead){weight + AHEAD, 128, 64};
    long each = ceil_div(128, s->high);
    return (Ahead){weight + CHUNK * (STEP_BYTES + strip * each * 16), each, 0};
}

static void do_panel(const Strips *s, const Room *room, const char *weight) {
    long each = s->high > 1 ? CHUNK : s->steps;
    for (long step = 0; step < s->steps; step += each, weight += each * STEP_BYTES)
        for (long strip = 0; strip < s->high; strip++) {
            long row = strip_row(s, strip), rows = strip_row(s, strip + 1) - row;
            const char *x = room->x + (row * s->steps + step * rows) * 64;
            float *acc = room->acc + row * PANEL;
            strip_of[rows](x, weight, least(each, s->steps - step), acc, step == 0, ahead_of(s, weight, strip));
        }
}

/* Returns whether a thread had no room for its rows. */
static int walk(const Gemm *g, int threads) {
    int failed = 0;
    long steps = ceil_div(g->k, 32), next = 0;
    Cut cut = cut_work(g, threads, rows_each(steps));
    long items = cut.row_blocks * cut.panel_blocks;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        Room *room = room_here(least(cut.rows_each, g->t), steps);
        long item, taken = -1; /* the rows in the room */
        failed = !room;
        while (!failed && (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items) {
            Block b = block_of(g, &cut, item);
            Strips s = {b.rows, ceil_div(b.rows, HIGH), steps};
            if (b.row != taken) take_rows(g, taken = b.row, &s, room->x);
            for (long p = b.panel; p < b.panel + b.panels; p++) {
                do_panel(&s, room, g->weight + p * steps * STEP_BYTES);
                put_block(g, room->acc, b.row, b.rows, p);
            }
        }
    }
    return failed;
}

/* Returns 0, or 1 when memory could not be had. */
__attribute__((visibility("default"))) int gemm_bf16_avx512bf16(const char *x, const char *weight, const float *bias,
                                                                char *out, long t, long n, long k, int out_bf16,
                                                                int threads) {
    Gemm g = {x, weight, bias, out, t, n, k, k, out_bf16};
    return t ? walk(&g, threads_for(&g, threads, 2)) : 0;
}
