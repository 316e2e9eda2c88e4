/* Matmul in SIMD registers: fp32 on all processors, and bf16 (widened to fp32) on those without a bf16 dot product.
 *
 * fp32 panels are [N/32][K][32]; bf16 panels are those of gemm_bf16.c and gemm_amx.c.
 * Every element is one chain of fused multiply-adds over k = 0, 1, ...; rows of a block share loads only. */
#include "gemm/gemm.h"

#define MAX_BLOCK_ROWS 128 /* rows of x that stay in a core's cache while it reads the weights */

#if SIMD_WIDTH == 16
#define MAX_ROWS 12
#define COLUMN_REGISTERS 2 /* registers of columns computed together */
#else
#define MAX_ROWS 4
#define COLUMN_REGISTERS 2
#endif

INLINE void multiply_rows_f32(const float *x, long lda, const float *weight, long k, float *acc, const int rows) {
    vf sum[MAX_ROWS][COLUMN_REGISTERS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < COLUMN_REGISTERS; j++) sum[r][j] = broadcast(0);
    for (long i = 0; i < k; i++, weight += PANEL) {
        __builtin_prefetch(weight + 1024, 0, 2);
        __builtin_prefetch(weight + 1024 + 16, 0, 2);
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < COLUMN_REGISTERS; j++) sum[r][j] += x[r * lda + i] * load_f32(weight + j * SIMD_WIDTH);
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < COLUMN_REGISTERS; j++) store_f32(acc + r * PANEL + j * SIMD_WIDTH, sum[r][j]);
}

INLINE vf even_floats(vu pairs) { return as_float(pairs << 16); }
INLINE vf odd_floats(vu pairs) { return as_float(pairs & 0xffff0000u); }

/* A row of x consists of pairs: two bf16 values per 32-bit word. The columns of one register are computed at a time, so
 * that the sums stay in registers. */
INLINE void multiply_rows_bf16(const uint32_t *x, long lda, const uint32_t *weight, long pairs, float *acc,
                               const int rows) {
    vf sum[MAX_ROWS];
    for (int r = 0; r < rows; r++) sum[r] = broadcast(0);
    for (long i = 0; i < pairs; i++) {
        vu w;
        const uint32_t *at = weight + (i / 16) * 512 + (i % 16) * 16;
        __builtin_memcpy(&w, at, sizeof w);
        __builtin_prefetch(at + 2048, 0, 2);
        vf even = even_floats(w), odd = odd_floats(w);
        for (int r = 0; r < rows; r++) {
            vu both = (vu){0} + x[r * lda + i];
            sum[r] += even_floats(both) * even;
            sum[r] += odd_floats(both) * odd;
        }
    }
    for (int r = 0; r < rows; r++) store_f32(acc + r * PANEL, sum[r]);
}

#define DISPATCH_ROWS(body, ...)             \
    switch (rows) {                          \
        case 1: body(__VA_ARGS__, 1); break; \
        case 2: body(__VA_ARGS__, 2); break; \
        case 3: body(__VA_ARGS__, 3); break; \
        case 4:                              \
            body(__VA_ARGS__, 4);            \
            break;                           \
            ROWS_ABOVE_4(body, __VA_ARGS__)  \
    }
#if SIMD_WIDTH == 16
#define ROWS_ABOVE_4(body, ...)            \
    case 5: body(__VA_ARGS__, 5); break;   \
    case 6: body(__VA_ARGS__, 6); break;   \
    case 7: body(__VA_ARGS__, 7); break;   \
    case 8: body(__VA_ARGS__, 8); break;   \
    case 9: body(__VA_ARGS__, 9); break;   \
    case 10: body(__VA_ARGS__, 10); break; \
    case 11: body(__VA_ARGS__, 11); break; \
    default: body(__VA_ARGS__, 12);
#else
#define ROWS_ABOVE_4(body, ...)
#endif

static void multiply_panel_f32(const Gemm *g, long row, int rows, long panel, float *acc) {
    const float *x = (const float *)g->x + row * g->lda, *weight = (const float *)g->weight + panel * g->k * PANEL;
    for (int j = 0; j < PANEL; j += COLUMN_REGISTERS * SIMD_WIDTH)
        DISPATCH_ROWS(multiply_rows_f32, x, g->lda, weight + j, g->k, acc + j)
}

static void multiply_panel_bf16(const Gemm *g, long row, int rows, long panel, float *acc) {
    long steps = ceil_div(g->k, 32);
    const uint32_t *x = (const uint32_t *)g->x + row * g->lda / 2;
    const uint32_t *weight = (const uint32_t *)g->weight + panel * steps * 512;
    for (int j = 0; j < PANEL; j += SIMD_WIDTH) {
        const uint32_t *columns = weight + (j / 16) * 256 + j % 16;
        DISPATCH_ROWS(multiply_rows_bf16, x, g->lda / 2, columns, steps * 16, acc + j)
    }
}

/* Work is split into blocks of rows times panels; threads take the next block until none is left. */
typedef struct {
    long row, rows, panel, panels;
} Block;

typedef struct {
    long rows_per_block, row_blocks, panels_per_block, panel_blocks;
} WorkSplit;

/* Divides the rows into blocks of at most `rows` rows (a multiple of 32), about four per thread. */
INLINE WorkSplit split_work(const Gemm *g, int threads, long rows) {
    long panels = ceil_div(g->n, PANEL);
    WorkSplit split = {.row_blocks = max_long(ceil_div(g->t, rows), 1)};
    split.rows_per_block = max_long(ceil_div(ceil_div(g->t, split.row_blocks), PANEL) * PANEL, PANEL);
    split.row_blocks = ceil_div(g->t, split.rows_per_block);
    split.panels_per_block = max_long(panels / max_long(4 * threads / max_long(split.row_blocks, 1), 1), 1);
    split.panel_blocks = ceil_div(panels, split.panels_per_block);
    return split;
}

INLINE Block block_at(const Gemm *g, const WorkSplit *split, long item) {
    Block b = {.row = item / split->panel_blocks * split->rows_per_block,
               .panel = item % split->panel_blocks * split->panels_per_block};
    long panels = ceil_div(g->n, PANEL);
    b.rows = g->t - b.row < split->rows_per_block ? g->t - b.row : split->rows_per_block;
    b.panels = panels - b.panel < split->panels_per_block ? panels - b.panel : split->panels_per_block;
    return b;
}

typedef void PanelKernel(const Gemm *, long, int, long, float *);

static void multiply(const Gemm *g, int threads, PanelKernel *panel_kernel) {
    WorkSplit split = split_work(g, threads, MAX_BLOCK_ROWS);
    long items = split.row_blocks * split.panel_blocks, next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        _Alignas(64) float acc[MAX_ROWS * PANEL];
        long item;
        while ((item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items) {
            Block b = block_at(g, &split, item);
            for (long p = b.panel; p < b.panel + b.panels; p++)
                for (long r = b.row; r < b.row + b.rows; r += MAX_ROWS) {
                    int rows = b.row + b.rows - r < MAX_ROWS ? b.row + b.rows - r : MAX_ROWS;
                    panel_kernel(g, r, rows, p, acc);
                    store_block(g, acc, r, rows, p);
                }
        }
    }
}

__attribute__((visibility("default"))) int JOIN(gemm_f32, SUFFIX)(const char *x, const char *weight, const float *bias,
                                                                  char *out, long t, long n, long k, int out_bf16,
                                                                  int threads) {
    Gemm g = {x, weight, bias, out, t, n, k, k, out_bf16};
    multiply(&g, threads_for(&g, threads, 4), multiply_panel_f32);
    return 0;
}

/* Copies the rows, padded with zeros to whole k-steps. Returns 0, or 1 when memory is exhausted. */
__attribute__((visibility("default"))) int JOIN(gemm_bf16, SUFFIX)(const char *x, const char *weight, const float *bias,
                                                                   char *out, long t, long n, long k, int out_bf16,
                                                                   int threads) {
    long padded_k = ceil_div(k, 32) * 32;
    char *copy = aligned_alloc(64, max_long(2 * t * padded_k, 64));
    if (!copy) return 1;
    for (long i = 0; i < t; i++) {
        memcpy(copy + 2 * i * padded_k, x + 2 * i * k, 2 * k);
        memset(copy + 2 * (i * padded_k + k), 0, 2 * (padded_k - k));
    }
    Gemm g = {copy, weight, bias, out, t, n, k, padded_k, out_bf16};
    multiply(&g, threads_for(&g, threads, 2), multiply_panel_bf16);
    free(copy);
    return 0;
}
