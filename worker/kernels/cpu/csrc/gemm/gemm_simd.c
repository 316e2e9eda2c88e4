/* Matmul on vector registers: fp32 everywhere, bf16 (widened to fp32) where no instruction multiplies it.
 *
 * fp32 panels are [N/32][K][32]; bf16 panels are those of gemm_bf16.c and gemm_amx.c.
 * An element is one chain of fused multiply-adds over k = 0, 1, ...; blocks of rows only share the loads. */
#include "gemm/gemm.h"

#define MOST_BLOCK_ROWS 128 /* rows of x that a core keeps while weights pass by */

#if LANES == 16
#define MOST_ROWS 12
#define WIDE 2 /* registers of columns at a time */
#else
#define MOST_ROWS 4
#define WIDE 2
#endif

INLINE void rows_f32(const float *x, long lda, const float *weight, long k, float *acc, const int rows) {
    vf sum[MOST_ROWS][WIDE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) sum[r][j] = splat(0);
    for (long i = 0; i < k; i++, weight += PANEL) {
        __builtin_prefetch(weight + 1024, 0, 2);
        __builtin_prefetch(weight + 1024 + 16, 0, 2);
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < WIDE; j++) sum[r][j] += x[r * lda + i] * load_f32(weight + j * LANES);
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDE; j++) store_f32(acc + r * PANEL + j * LANES, sum[r][j]);
}

INLINE vf even_of(vu pairs) { return as_float(pairs << 16); }
INLINE vf odd_of(vu pairs) { return as_float(pairs & 0xffff0000u); }

/* x is a row of pairs: two bf16 a word. One column register at a time keeps the sums in registers. */
INLINE void rows_bf16(const uint32_t *x, long lda, const uint32_t *weight, long pairs, float *acc, const int rows) {
    vf sum[MOST_ROWS];
    for (int r = 0; r < rows; r++) sum[r] = splat(0);
    for (long i = 0; i < pairs; i++) {
        vu w;
        const uint32_t *at = weight + (i / 16) * 512 + (i % 16) * 16;
        __builtin_memcpy(&w, at, sizeof w);
        __builtin_prefetch(at + 2048, 0, 2);
        vf even = even_of(w), odd = odd_of(w);
        for (int r = 0; r < rows; r++) {
            vu both = (vu){0} + x[r * lda + i];
            sum[r] += even_of(both) * even;
            sum[r] += odd_of(both) * odd;
        }
    }
    for (int r = 0; r < rows; r++) store_f32(acc + r * PANEL, sum[r]);
}

#define BY_ROWS(body, ...)                                                            \
    switch (rows) {                                                                   \
        case 1: body(__VA_ARGS__, 1); break;                                          \
        case 2: body(__VA_ARGS__, 2); break;                                          \
        case 3: body(__VA_ARGS__, 3); break;                                          \
        case 4: body(__VA_ARGS__, 4); break;                                          \
        MORE_ROWS(body, __VA_ARGS__)                                                  \
    }
#if LANES == 16
#define MORE_ROWS(body, ...)                 \
    case 5: body(__VA_ARGS__, 5); break;     \
    case 6: body(__VA_ARGS__, 6); break;     \
    case 7: body(__VA_ARGS__, 7); break;     \
    case 8: body(__VA_ARGS__, 8); break;     \
    case 9: body(__VA_ARGS__, 9); break;     \
    case 10: body(__VA_ARGS__, 10); break;   \
    case 11: body(__VA_ARGS__, 11); break;   \
    default: body(__VA_ARGS__, 12);
#else
#define MORE_ROWS(body, ...)
#endif

static void panel_f32(const Gemm *g, long row, int rows, long panel, float *acc) {
    const float *x = (const float *)g->x + row * g->lda, *weight = (const float *)g->weight + panel * g->k * PANEL;
    for (int j = 0; j < PANEL; j += WIDE * LANES) BY_ROWS(rows_f32, x, g->lda, weight + j, g->k, acc + j)
}

static void panel_bf16(const Gemm *g, long row, int rows, long panel, float *acc) {
    long steps = ceil_div(g->k, 32);
    const uint32_t *x = (const uint32_t *)g->x + row * g->lda / 2;
    const uint32_t *weight = (const uint32_t *)g->weight + panel * steps * 512;
    for (int j = 0; j < PANEL; j += LANES) {
        const uint32_t *columns = weight + (j / 16) * 256 + j % 16;
        BY_ROWS(rows_bf16, x, g->lda / 2, columns, steps * 16, acc + j)
    }
}

/* The work is cut into items of rows by panels; threads take the next one until none is left. */
typedef struct {
    long row, rows, panel, panels;
} Block;

typedef struct {
    long rows_each, row_blocks, panels_each, panel_blocks;
} Cut;

/* Items of at most `rows` rows (a multiple of 32), about four a thread. */
INLINE Cut cut_work(const Gemm *g, int threads, long rows) {
    long panels = ceil_div(g->n, PANEL);
    Cut cut = {.row_blocks = at_least(ceil_div(g->t, rows), 1)};
    cut.rows_each = at_least(ceil_div(ceil_div(g->t, cut.row_blocks), PANEL) * PANEL, PANEL);
    cut.row_blocks = ceil_div(g->t, cut.rows_each);
    cut.panels_each = at_least(panels / at_least(4 * threads / at_least(cut.row_blocks, 1), 1), 1);
    cut.panel_blocks = ceil_div(panels, cut.panels_each);
    return cut;
}

INLINE Block block_of(const Gemm *g, const Cut *cut, long item) {
    Block b = {.row = item / cut->panel_blocks * cut->rows_each, .panel = item % cut->panel_blocks * cut->panels_each};
    long panels = ceil_div(g->n, PANEL);
    b.rows = g->t - b.row < cut->rows_each ? g->t - b.row : cut->rows_each;
    b.panels = panels - b.panel < cut->panels_each ? panels - b.panel : cut->panels_each;
    return b;
}

typedef void PanelRows(const Gemm *, long, int, long, float *);

static void walk(const Gemm *g, int threads, PanelRows *panel_rows) {
    Cut cut = cut_work(g, threads, MOST_BLOCK_ROWS);
    long items = cut.row_blocks * cut.panel_blocks, next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        _Alignas(64) float acc[MOST_ROWS * PANEL];
        long item;
        while ((item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items) {
            Block b = block_of(g, &cut, item);
            for (long p = b.panel; p < b.panel + b.panels; p++)
                for (long r = b.row; r < b.row + b.rows; r += MOST_ROWS) {
                    int rows = b.row + b.rows - r < MOST_ROWS ? b.row + b.rows - r : MOST_ROWS;
                    panel_rows(g, r, rows, p, acc);
                    put_block(g, acc, r, rows, p);
                }
        }
    }
}

__attribute__((visibility("default"))) int JOIN(gemm_f32, SUFFIX)(const char *x, const char *weight, const float *bias,
                                                                  char *out, long t, long n, long k, int out_bf16,
                                                                  int threads) {
    Gemm g = {x, weight, bias, out, t, n, k, k, out_bf16};
    walk(&g, threads_for(&g, threads, 4), panel_f32);
    return 0;
}

/* Rows are copied so that each is whole pairs, zeros behind; returns 1 when there is no memory for it. */
__attribute__((visibility("default"))) int JOIN(gemm_bf16, SUFFIX)(const char *x, const char *weight, const float *bias,
                                                                   char *out, long t, long n, long k, int out_bf16,
                                                                   int threads) {
    long padded = ceil_div(k, 32) * 32;
    char *copy = aligned_alloc(64, at_least(2 * t * padded, 64));
    if (!copy) return 1;
    for (long i = 0; i < t; i++) {
        memcpy(copy + 2 * i * padded, x + 2 * i * k, 2 * k);
        memset(copy + 2 * (i * padded + k), 0, 2 * (padded - k));
    }
    Gemm g = {copy, weight, bias, out, t, n, k, padded, out_bf16};
    walk(&g, threads_for(&g, threads, 2), panel_bf16);
    free(copy);
    return 0;
}
