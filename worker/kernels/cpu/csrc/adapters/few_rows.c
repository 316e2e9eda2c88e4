/* Products of adapters, whose matrices are narrow: the matmul for large weights (gemm/) would spend much of its time on
 * padding, on beginning anew and on passing results to the addition behind it. Here, a strip of rows has its sums of two
 * registers of columns in registers, padding is not read, and what B gives is added at once.
 *
 * Every element is the sum that the matmul of the same instruction set makes: a chain over the inputs in order, over
 * pairs of inputs (vdpbf16ps), or as TDPBF16PS adds up a k-step of 32 inputs (gemm/amx/amx_few_rows.h). So a row has the
 * same bits in any company. */
#include "../simd.h"
#include "adapters.h"
#include <string.h>

#define REGISTERS 2 /* of columns, computed together */
#define COLUMNS (REGISTERS * SIMD_WIDTH)
#define HALF_PANEL (PANEL / 2)
#define K_STEP 32
#define PREFETCH_DISTANCE 8192 /* bytes ahead of use */

/* The most rows whose sums stay in registers. Tiles have two more sums of each. */
#ifdef IN_TILES
#define STRIP_ROWS 4
#define FOR_STRIP_ROWS(X) X(1) X(2) X(3) X(4)
#elif SIMD_WIDTH == 16
#define STRIP_ROWS 12
#define FOR_STRIP_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define STRIP_ROWS 6
#define FOR_STRIP_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

typedef struct {
    vf of[STRIP_ROWS][REGISTERS];
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

/* Returns where the pairs of column `column` of a panel are, in bytes from those of its first column. */
INLINE long pairs_at(long column) { return column / HALF_PANEL * K_STEP * HALF_PANEL * 2 + column % HALF_PANEL * 4; }

#if defined(__AVX512BF16__) && !defined(IN_TILES)
/* Adds the products of a pair of inputs of each row. weight: where the pairs of the columns are */
INLINE void add_pair(const char *weight, const char *const *x, long pair, Sums *sums, const int rows,
                     const int registers) {
    vu numbers[REGISTERS];
    for (int j = 0; j < registers; j++) numbers[j] = load_words(weight + pairs_at(j * SIMD_WIDTH));
    for (int r = 0; r < rows; r++) {
        vu inputs = broadcast_pair(x[r] + pair * 4);
        __asm__("" : "+v"(inputs)); /* keeps gcc from loading them again for each register */
        for (int j = 0; j < registers; j++)
            sums->of[r][j] = (vf)_mm512_dpbf16_ps((__m512)sums->of[r][j], (__m512bh)inputs, (__m512bh)numbers[j]);
    }
}
#else
/* Adds the products of a pair of inputs of each row: of the even ones to `even`, then of the odd ones to `odd`. */
INLINE void add_halves(const char *weight, const char *const *x, long pair, Sums *even, Sums *odd, const int rows,
                       const int registers) {
    for (int second = 0; second < 2; second++) { /* words are loaded twice: registers are scarce */
        vf numbers[REGISTERS];
        Sums *sums = second ? odd : even;
        for (int j = 0; j < registers; j++) {
            vu words = load_words(weight + pairs_at(j * SIMD_WIDTH));
            numbers[j] = second ? high_half(words) : low_half(words);
        }
        for (int r = 0; r < rows; r++) {
            vu inputs = broadcast_pair(x[r] + pair * 4);
            vf input = second ? high_half(inputs) : low_half(inputs);
            for (int j = 0; j < registers; j++) sums->of[r][j] = simd_fma(input, numbers[j], sums->of[r][j]);
        }
    }
}
#endif

INLINE void prefetch_columns(const char *weight, const int registers) {
    for (int j = 0; j < registers; j++)
        if (j * SIMD_WIDTH % HALF_PANEL == 0)
            __builtin_prefetch(weight + pairs_at(j * SIMD_WIDTH) + PREFETCH_DISTANCE, 0, 3);
}

/* Adds the products of pairs of inputs of a k-step. weight: [2 halves][pairs][16 columns][2]; x: the inputs of each row */
INLINE void add_pairs(const char *weight, const char *const *x, long pairs, Sums *sums, const int rows,
                      const int registers) {
#ifdef IN_TILES
    Sums even, odd;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) even.of[r][j] = odd.of[r][j] = broadcast(0);
#endif
    for (long pair = 0; pair < pairs; pair++, weight += HALF_PANEL * 4) {
        prefetch_columns(weight, registers);
#ifdef IN_TILES
        add_halves(weight, x, pair, &even, &odd, rows, registers);
#elif defined(__AVX512BF16__)
        add_pair(weight, x, pair, sums, rows, registers);
#else
        add_halves(weight, x, pair, sums, sums, rows, registers);
#endif
    }
#ifdef IN_TILES
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sums->of[r][j] += even.of[r][j] + odd.of[r][j];
#endif
}

/* Adds the products of fp32 inputs. weight: [inputs][32 columns] */
INLINE void add_inputs(const float *weight, const char *const *x, long inputs, Sums *sums, const int rows,
                       const int registers) {
    for (long k = 0; k < inputs; k++, weight += PANEL)
        for (int j = 0; j < registers; j++) {
            const float *at = weight + j * SIMD_WIDTH;
            vf numbers = load_f32(at);
            if (j * SIMD_WIDTH % HALF_PANEL == 0) __builtin_prefetch((const char *)at + PREFETCH_DISTANCE, 0, 3);
            for (int r = 0; r < rows; r++)
                sums->of[r][j] = simd_fma(broadcast(((const float *)x[r])[k]), numbers, sums->of[r][j]);
        }
}

/* Computes `registers` registers of columns, from `column` on, from the first k inputs of each row; the others meet
 * zeros. */
INLINE void multiply_columns(const Weight *w, long column, const char *const *rows_x, long k, Sums *sums,
                             const int rows, const int registers, const int is_bf16) {
    const char *x[STRIP_ROWS];
    char tails[STRIP_ROWS][K_STEP * 2];
    long steps = (w->k + K_STEP - 1) / K_STEP, panel = column / PANEL;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sums->of[r][j] = broadcast(0);
    for (long s = 0; s * K_STEP < k; s++) {
        long inputs = k - s * K_STEP < K_STEP ? k - s * K_STEP : K_STEP;
        for (int r = 0; r < rows; r++) {
            x[r] = rows_x[r] + s * K_STEP * (is_bf16 ? 2 : 4);
            if (!is_bf16 || inputs == K_STEP) continue;
            memset(tails[r], 0, sizeof tails[r]);
            x[r] = memcpy(tails[r], x[r], inputs * 2);
        }
        if (is_bf16)
            add_pairs(w->panels + (panel * steps + s) * K_STEP * PANEL * 2 + pairs_at(column % PANEL), x,
                      (inputs + 1) / 2, sums, rows, registers);
        else
            add_inputs((const float *)w->panels + (panel * w->k + s * K_STEP) * PANEL + column % PANEL, x, inputs, sums,
                       rows, registers);
    }
}

/* Writes outputs of A, `registers` registers from `column` on, for each row. */
INLINE void multiply_a(const Change *c, long column, const int rows, const int registers, const int is_bf16) {
    const Weight *a = c->product->a;
    long size = is_bf16 ? 2 : 4;
    const char *x[FEW_ROWS];
    Sums sums;
    for (int r = 0; r < rows; r++) x[r] = c->job->x + c->rows->rows[r] * a->k * size;
    multiply_columns(a, column, x, a->k, &sums, rows, registers, is_bf16);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++)
            store(c->low + r * a->n * size, column + j * SIMD_WIDTH, a->n, sums.of[r][j], is_bf16);
}

INLINE void all_of_a(const Change *c, long from, long to, const int rows, const int is_bf16) {
    for (long column = from; column < to; column += COLUMNS)
        if (to - column > SIMD_WIDTH)
            multiply_a(c, column, rows, REGISTERS, is_bf16);
        else
            multiply_a(c, column, rows, 1, is_bf16);
}

/* Adds columns of a part, from `column` on, to the output of a strip of rows, from `row` on. */
INLINE void add_strip(const Change *c, const ProductPart *part, long column, long row, const int rows,
                      const int is_bf16) {
    long size = is_bf16 ? 2 : 4, row_bytes = count_columns(c->job->weights) * size, n = part->b->n;
    char *out = c->job->out + part->column * size;
    const int64_t *places = c->rows->rows + row;
    const char *x[STRIP_ROWS];
    Sums sums;
    for (int r = 0; r < rows; r++) {
        x[r] = c->low + ((row + r) * c->product->a->n + part->first_rank) * size;
        __builtin_prefetch(out + places[r] * row_bytes + column * size, 1, 3); /* far away: other weights came between */
    }
    multiply_columns(part->b, column, x, part->ranks, &sums, rows, REGISTERS, is_bf16);
    for (int j = 0; j < REGISTERS && column + j * SIMD_WIDTH < n; j++) {
        long at = column + j * SIMD_WIDTH;
        vf factors = load(c->product->factors + part->column, at, n, 0);
        for (int r = 0; r < rows; r++) {
            char *y = out + places[r] * row_bytes;
            vf scaled = rounded_product(sums.of[r][j], factors);
            store(y, at, n, load(y, at, n, is_bf16) + rounded_product(scaled, broadcast(c->rows->scale)), is_bf16);
        }
    }
}

typedef void AddStrip(const Change *c, const ProductPart *part, long from, long to, long row);

#ifdef IN_TILES
#define BEGIN unsigned mode = _mm_getcsr(); _mm_setcsr(mode | 0x8040) /* denormals are zeros, as in tiles */
#define END _mm_setcsr(mode)
#else
#define BEGIN
#define END
#endif

/* Each count of rows is compiled by itself, so that its sums stay in registers. */
#define STRIP(rows, dtype, is_bf16)                                                                                 \
    static void add_strip_##dtype##_##rows(const Change *c, const ProductPart *part, long from, long to, long row) { \
        for (long column = from; column < to; column += COLUMNS) add_strip(c, part, column, row, rows, is_bf16);     \
    }
#define A_CASE(rows, is_bf16) case rows: all_of_a(c, from, to, rows, is_bf16); break;
_Static_assert(FEW_ROWS == 4, "A has a case for every count of few rows");

#define KERNELS(dtype, is_bf16)                                                                                      \
    EXPORT(multiply_a_##dtype)(const Change *c, long from, long to) {                                                \
        BEGIN;                                                                                                       \
        switch (c->rows->count) { A_CASE(1, is_bf16) A_CASE(2, is_bf16) A_CASE(3, is_bf16) A_CASE(4, is_bf16) }      \
        END;                                                                                                         \
    }                                                                                                                \
    EXPORT(add_b_##dtype)(const Change *c, const ProductPart *part, long from, long to, long row, long end) {        \
        static AddStrip *const strips[] = {FOR_STRIP_ROWS(ENTRY_##dtype)};                                           \
        long rows = end - row, count = (rows + STRIP_ROWS - 1) / STRIP_ROWS;                                         \
        BEGIN;                                                                                                       \
        for (long i = 0; i < count; i++) {                                                                           \
            long first = i * rows / count, own = (i + 1) * rows / count - first;                                     \
            strips[own - 1](c, part, from, to, row + first);                                                         \
        }                                                                                                            \
        END;                                                                                                         \
    }

#define STRIP_bf16(rows) STRIP(rows, bf16, 1)
#define ENTRY_bf16(rows) add_strip_bf16_##rows,
FOR_STRIP_ROWS(STRIP_bf16)
KERNELS(bf16, 1)
#ifndef IN_TILES
#define STRIP_f32(rows) STRIP(rows, f32, 0)
#define ENTRY_f32(rows) add_strip_f32_##rows,
FOR_STRIP_ROWS(STRIP_f32)
KERNELS(f32, 0)
#endif
