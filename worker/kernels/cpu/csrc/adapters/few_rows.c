/* Products of adapters for few rows. Their matrices are narrow: the matmul for large weights (gemm/) would spend most of
 * its time on padding and on beginning anew. Here, 16 columns of a panel are in registers, and padding is not read.
 *
 * Every element is the sum that the matmul of the same instruction set makes: a chain over the inputs in order, over
 * pairs of inputs (vdpbf16ps), or as TDPBF16PS adds up a k-step of 32 inputs (gemm/amx/amx_few_rows.h). So a row has the
 * same bits in any company. */
#include "../simd.h"
#include "adapters.h"
#include <string.h>

#define COLUMNS 16                         /* computed together: half a panel */
#define REGISTERS (COLUMNS / SIMD_WIDTH)
#define K_STEP 32
#define PREFETCH_DISTANCE 4096 /* bytes ahead of use */

typedef struct {
    vf of[FEW_ROWS][REGISTERS];
} Sums;

INLINE vu load_words(const char *p) {
    vu words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
}

/* Returns two neighbouring bf16 inputs in every element. */
INLINE vu broadcast_pair(const char *p) {
    uint32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    return (vu){0} + word;
}

INLINE vf low_half(vu pairs) { return as_float(pairs << 16); }
INLINE vf high_half(vu pairs) { return as_float(pairs & 0xffff0000u); }

/* Adds the products of pairs of inputs of a k-step. weight: [pairs][16 columns][2]; x: the inputs of each row */
INLINE void add_pairs(const char *weight, const char *const *x, long pairs, Sums *sums, const int rows) {
#ifdef IN_TILES
    Sums even = {{{{0}}}}, odd = {{{{0}}}};
#endif
    for (long pair = 0; pair < pairs; pair++, weight += COLUMNS * 4) {
        __builtin_prefetch(weight + PREFETCH_DISTANCE, 0, 3);
        for (int j = 0; j < REGISTERS; j++) {
            vu numbers = load_words(weight + j * SIMD_WIDTH * 4);
            for (int r = 0; r < rows; r++) {
                vu inputs = broadcast_pair(x[r] + pair * 4);
#ifdef IN_TILES
                even.of[r][j] = simd_fma(low_half(inputs), low_half(numbers), even.of[r][j]);
                odd.of[r][j] = simd_fma(high_half(inputs), high_half(numbers), odd.of[r][j]);
#elif defined(__AVX512BF16__)
                sums->of[r][j] = (vf)_mm512_dpbf16_ps((__m512)sums->of[r][j], (__m512bh)inputs, (__m512bh)numbers);
#else
                sums->of[r][j] = simd_fma(low_half(inputs), low_half(numbers), sums->of[r][j]);
                sums->of[r][j] = simd_fma(high_half(inputs), high_half(numbers), sums->of[r][j]);
#endif
            }
        }
    }
#ifdef IN_TILES
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < REGISTERS; j++) sums->of[r][j] += even.of[r][j] + odd.of[r][j];
#endif
}

/* Adds the products of fp32 inputs. weight: [inputs][32 columns] */
INLINE void add_inputs(const float *weight, const char *const *x, long inputs, Sums *sums, const int rows) {
    for (long k = 0; k < inputs; k++, weight += PANEL)
        for (int j = 0; j < REGISTERS; j++) {
            vf numbers = load_f32(weight + j * SIMD_WIDTH);
            for (int r = 0; r < rows; r++)
                sums->of[r][j] = simd_fma(broadcast(((const float *)x[r])[k]), numbers, sums->of[r][j]);
        }
}

/* Computes 16 columns, half a panel, from the first k inputs of each row; the others meet zeros. */
INLINE void multiply_half(const Weight *w, long panel, long half, const char *const *rows_x, long k, Sums *sums,
                          const int rows, const int is_bf16) {
    const char *x[FEW_ROWS];
    char tails[FEW_ROWS][K_STEP * 2];
    long steps = (w->k + K_STEP - 1) / K_STEP;
    memset(sums, 0, sizeof *sums);
    for (long s = 0; s * K_STEP < k; s++) {
        long inputs = k - s * K_STEP < K_STEP ? k - s * K_STEP : K_STEP;
        for (int r = 0; r < rows; r++) {
            x[r] = rows_x[r] + s * K_STEP * (is_bf16 ? 2 : 4);
            if (!is_bf16 || inputs == K_STEP) continue;
            memset(tails[r], 0, sizeof tails[r]);
            x[r] = memcpy(tails[r], x[r], inputs * 2);
        }
        if (is_bf16)
            add_pairs(w->panels + ((panel * steps + s) * 2 + half) * K_STEP * COLUMNS * 2, x, (inputs + 1) / 2, sums,
                      rows);
        else
            add_inputs((const float *)w->panels + (panel * w->k + s * K_STEP) * PANEL + half * COLUMNS, x, inputs, sums,
                       rows);
    }
}

/* Writes 16 outputs of A, those from `column` on, for each row. */
INLINE void multiply_a(const Change *c, long column, const int rows, const int is_bf16) {
    const Weight *a = c->product->a;
    long size = is_bf16 ? 2 : 4;
    const char *x[FEW_ROWS];
    Sums sums;
    for (int r = 0; r < rows; r++) x[r] = c->job->x + c->rows->rows[r] * a->k * size;
    multiply_half(a, column / PANEL, column % PANEL / COLUMNS, x, a->k, &sums, rows, is_bf16);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < REGISTERS; j++)
            store(c->low + r * a->n * size, column + j * SIMD_WIDTH, a->n, sums.of[r][j], is_bf16);
}

/* Adds 16 columns of a part, those from `column` on, to the output of each row. */
INLINE void add_b(const Change *c, const ProductPart *part, long column, const int rows, const int is_bf16) {
    long size = is_bf16 ? 2 : 4, width = count_columns(c->job->weights), n = part->b->n;
    const char *x[FEW_ROWS];
    Sums sums;
    for (int r = 0; r < rows; r++) x[r] = c->low + (r * c->product->a->n + part->first_rank) * size;
    multiply_half(part->b, column / PANEL, column % PANEL / COLUMNS, x, part->ranks, &sums, rows, is_bf16);
    for (int r = 0; r < rows; r++) {
        char *y = c->job->out + (c->rows->rows[r] * width + part->column) * size;
        for (int j = 0; j < REGISTERS; j++) {
            long at = column + j * SIMD_WIDTH;
            vf scaled = rounded_product(sums.of[r][j], load(c->product->factors + part->column, at, n, 0));
            store(y, at, n, load(y, at, n, is_bf16) + rounded_product(scaled, broadcast(c->rows->scale)), is_bf16);
        }
    }
}

/* Each count of rows is compiled by itself, so that its sums stay in registers. */
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4)
_Static_assert(FEW_ROWS == 4, "EACH_COUNT has a case for every count of rows");

INLINE void all_of_a(const Change *c, long from, long to, const int rows, const int is_bf16) {
    for (long column = from; column < to; column += COLUMNS) multiply_a(c, column, rows, is_bf16);
}

INLINE void all_of_b(const Change *c, const ProductPart *part, long from, long to, const int rows, const int is_bf16) {
    for (long column = from; column < to; column += COLUMNS) add_b(c, part, column, rows, is_bf16);
}

#ifdef IN_TILES
#define BEGIN unsigned mode = _mm_getcsr(); _mm_setcsr(mode | 0x8040) /* denormals are zeros, as in tiles */
#define END _mm_setcsr(mode)
#else
#define BEGIN
#define END
#endif

#define FEW_ROWS_KERNELS(dtype)                                                                         \
    EXPORT(multiply_a_##dtype)(const Change *c, long from, long to) {                                   \
        BEGIN;                                                                                          \
        switch (c->rows->count) { EACH_COUNT(A_CASE_##dtype) }                                          \
        END;                                                                                            \
    }                                                                                                   \
    EXPORT(add_b_##dtype)(const Change *c, const ProductPart *part, long from, long to) {               \
        BEGIN;                                                                                          \
        switch (c->rows->count) { EACH_COUNT(B_CASE_##dtype) }                                          \
        END;                                                                                            \
    }

#define A_CASE_bf16(rows) case rows: all_of_a(c, from, to, rows, 1); break;
#define B_CASE_bf16(rows) case rows: all_of_b(c, part, from, to, rows, 1); break;
#define A_CASE_f32(rows) case rows: all_of_a(c, from, to, rows, 0); break;
#define B_CASE_f32(rows) case rows: all_of_b(c, part, from, to, rows, 0); break;

FEW_ROWS_KERNELS(bf16)
#ifndef IN_TILES
FEW_ROWS_KERNELS(f32)
#endif
