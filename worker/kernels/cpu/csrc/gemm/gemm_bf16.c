/* bf16 matmul on vdpbf16ps: a lane adds the products of a pair of k. Panels of weights are the AMX ones, so a packed weight
 * serves every processor: [N/32][K/32][2 halves][16 pairs][16 columns][2].
 *
 * An element is one chain over the pairs of k in order. The accumulators of up to 12 rows x 32 columns stay in registers,
 * through the whole K where there are no more rows than that. More rows take turns with chunks of K, which the
 * second-level cache keeps; accumulators are put down in between, which loses no bit. */
#include "gemm/gemm.h"
#include "work_sharing.h"

#define STEP_BYTES 2048 /* one k-step of a panel */
#define HIGH 12         /* rows whose accumulators, two registers each, fit */
#define CHUNK 40        /* most k-steps of a chunk: with fewer, accumulators are put down too often */
#define AHEAD 8192      /* how far ahead of its use a weight is asked for when few rows stream it */
#define MOST_ROWS 512   /* of a thread's item, */
#define BLOCK_BYTES (256L << 10)

/* What is asked for with every pair of k: two lines, `second` bytes apart. */
typedef struct {
    const char *next;
    long each, second;
} Ahead;

/* Some rows through some k-steps of a panel; x: [steps][rows][32], acc: [rows][32]; `first`: no step came before. */
typedef void Run(const char *x, const char *weight, long steps, float *acc, int first, const Ahead *ahead);

/* An item's rows, cut evenly into strips of at most HIGH, each laid out as [K/32][rows of it][32]. */
typedef struct {
    long high, steps, chunk; /* strips, k-steps, and those of a chunk */
    struct {
        Run *run;
        long row, rows;
    } strip[MOST_ROWS / HIGH + 1];
} Strips;

/* Where a thread lays out an item's rows and puts accumulators down. */
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
    for (long i = 0; i < s->high; i++) {
        long rows = s->strip[i].rows;
        for (long r = 0; r < rows; r++) {
            const char *from = g->x + (row + s->strip[i].row + r) * g->k * 2;
            char *at = to + r * 64;
            for (long j = 0; j < whole; j++, from += 64, at += rows * 64)
                _mm512_store_si512(at, _mm512_loadu_si512(from));
            if (left) _mm512_store_si512(at, _mm512_maskz_loadu_epi16((1u << left) - 1, from));
        }
        to += rows * s->steps * 64;
    }
}

INLINE void run_strip(const char *x, const char *weight, long steps, float *acc, int first, const Ahead *ahead,
                      const int rows) {
    const char *next = ahead->next;
    long each = ahead->each, second = ahead->second;
    __m512 sum[HIGH][2];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) sum[r][j] = first ? _mm512_setzero_ps() : _mm512_load_ps(acc + r * PANEL + j * 16);
    for (long i = 0; i < steps * 16; i++, next += each) {
        const char *w = weight + i / 16 * STEP_BYTES + i % 16 * 64, *at = x + i / 16 * rows * 64 + i % 16 * 4;
        __builtin_prefetch(next, 0, 3);
        __builtin_prefetch(next + second, 0, 3);
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

#define RUN(n)                                                                                                     \
    static void run_##n(const char *x, const char *w, long steps, float *acc, int first, const Ahead *ahead) {     \
        run_strip(x, w, steps, acc, first, ahead, n);                                                              \
    }
RUN(1) RUN(2) RUN(3) RUN(4) RUN(5) RUN(6) RUN(7) RUN(8) RUN(9) RUN(10) RUN(11) RUN(12)

static void cut_strips(Strips *s, long rows) {
    static Run *const run[] = {run_1, run_2, run_3, run_4, run_5, run_6, run_7, run_8, run_9, run_10, run_11, run_12};
    s->high = ceil_div(rows, HIGH);
    s->chunk = s->high > 1 ? ceil_div(s->steps, ceil_div(s->steps, CHUNK)) : s->steps;
    for (long i = 0; i < s->high; i++) {
        long row = i * rows / s->high, end = (i + 1) * rows / s->high;
        s->strip[i].row = row, s->strip[i].rows = end - row, s->strip[i].run = run[end - row - 1];
    }
}

/* More than one strip ask for the next chunk together; one asks for what it will read itself. */
INLINE Ahead ahead_of(const Strips *s, const char *weight) {
    if (s->high == 1) return (Ahead){weight + AHEAD, 128, 64};
    return (Ahead){weight + s->chunk * STEP_BYTES, ceil_div(128, s->high), 0};
}

/* A panel's results for the rows from `row` on, which the room holds; a strip's leave as soon as they are done. */
static void do_panel(const Gemm *g, const Strips *s, const Room *room, long row, long panel) {
    const char *weight = g->weight + panel * s->steps * STEP_BYTES;
    for (long step = 0, steps; step < s->steps; step += steps, weight += steps * STEP_BYTES) {
        steps = least(s->chunk, s->steps - step);
        Ahead ahead = ahead_of(s, weight);
        for (long i = 0; i < s->high; i++, ahead.next += steps * 16 * ahead.each) {
            long first = s->strip[i].row, rows = s->strip[i].rows;
            float *acc = room->acc + first * PANEL;
            s->strip[i].run(room->x + (first * s->steps + step * rows) * 64, weight, steps, acc, step == 0, &ahead);
            if (step + steps == s->steps) put_block(g, acc, row + first, rows, panel);
        }
    }
}

/* Returns whether a thread had no room for its rows. */
static int walk(const Gemm *g, int threads) {
    int failed = 0;
    long steps = ceil_div(g->k, 32), panels = ceil_div(g->n, PANEL), blocks = ceil_div(g->t, rows_each(steps));
    long each = ceil_div(ceil_div(g->t, blocks), PANEL) * PANEL, units = ceil_div(g->t, each) * panels;
    Share shares[threads];
    share_out(shares, units, threads);
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        Room *room = room_here(least(each, g->t), steps);
        Strips s = {.steps = steps};
        long unit, taken = -1; /* the block of rows in the room */
        failed = !room;
        while (!failed && (unit = take_unit(shares, omp_get_thread_num(), threads)) >= 0) {
            long row = unit / panels * each;
            if (row != taken) {
                cut_strips(&s, least(each, g->t - row));
                take_rows(g, taken = row, &s, room->x);
            }
            do_panel(g, &s, room, row, unit % panels);
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
