/* Products of adapters, whose matrices are narrow. The matmul for large weights (ops/linear/csrc) would spend much of its time on
 * padding, on setup, and on storing results that another loop then adds. Here, the sums of a strip of rows and two
 * registers of columns stay in registers, padding is not read, and the products with B are added to the output without
 * being stored first.
 *
 * Every element is summed in the same order as in the matmul of the same instruction set: a chain over the inputs, a
 * chain over pairs of inputs (vdpbf16ps), or the order of TDPBF16PS in a k-step of 32 inputs (amx_few_rows.h).
 * So a row has the same bits in every batch. */
#include "simd.h"
#include "adapters.h"
#include <string.h>

#define REGISTERS 2 /* how many registers of columns are computed together */
#define COLUMNS (REGISTERS * SIMD_WIDTH)
#define HALF_PANEL (PANEL / 2)
#define K_STEP 32
/* How many bytes ahead weights are prefetched, into the L2 cache, because the L1 cache has few fill buffers. */
#define PREFETCH_DISTANCE (16L << 10)

/* The most rows whose sums stay in registers. IN_TILES needs two more sums for each row: of even and of odd inputs. */
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

/* Returns a register with the same pair of neighbouring bf16 inputs in every 32-bit element. */
INLINE vu broadcast_pair(const char *p) {
    uint32_t word;
    __builtin_memcpy(&word, p, sizeof word);
    return (vu){0} + word;
}

INLINE vf low_half(vu pairs) { return as_float(pairs << 16); }
INLINE vf high_half(vu pairs) { return as_float(pairs & 0xffff0000u); }

/* Returns the offset, in bytes, of a column's pairs in a k-step of a panel. */
INLINE long pairs_at(long column) { return column / HALF_PANEL * K_STEP * HALF_PANEL * 2 + column % HALF_PANEL * 4; }

INLINE void prefetch(const char *p) { __builtin_prefetch(p + PREFETCH_DISTANCE, 0, 2); }

/* Prefetches the cache lines that are due while pair `pair` of a k-step is multiplied. The k-step has `pairs` pairs.
 * Lines are prefetched in memory order, although the two halves of a k-step are read alternately: memory order is twice
 * as fast. */
INLINE void prefetch_pair(const char *step, long pair, long pairs, const int whole_panel) {
    if (!whole_panel) {
        prefetch(step + pair * HALF_PANEL * 4);
        return;
    }
    const char *next = step + pair * HALF_PANEL * 8;
    if (pair * 2 >= pairs) next += (K_STEP / 2 - pairs) * HALF_PANEL * 4; /* skips to the second half */
    prefetch(next);
    prefetch(next + HALF_PANEL * 4);
}

/* Adds the products of a pair of inputs of each row. vdpbf16ps adds both products to `sums`. Without vdpbf16ps, the
 * product of the even input is added to `sums`, and that of the odd input to `odd`. `sums` and `odd` may be the same
 * object.
 * weight: the pairs of the columns; at: offset of the inputs in a row of x, in bytes */
#if defined(__AVX512BF16__) && !defined(IN_TILES)
INLINE void add_pair(const char *weight, const char *const *x, long at, Sums *sums, Sums *odd, const int rows,
                     const int registers) {
    vu numbers[REGISTERS];
    for (int j = 0; j < registers; j++) numbers[j] = load_words(weight + pairs_at(j * SIMD_WIDTH));
    for (int r = 0; r < rows; r++) {
        vu inputs = broadcast_pair(x[r] + at);
        __asm__("" : "+v"(inputs)); /* keeps gcc from reloading the inputs for each register */
        for (int j = 0; j < registers; j++)
            sums->of[r][j] = (vf)_mm512_dpbf16_ps((__m512)sums->of[r][j], (__m512bh)inputs, (__m512bh)numbers[j]);
    }
    (void)odd;
}
#else
INLINE void add_pair(const char *weight, const char *const *x, long at, Sums *sums, Sums *odd, const int rows,
                     const int registers) {
    for (int second = 0; second < 2; second++) { /* loads words once for each input of the pair: registers are scarce */
        vf numbers[REGISTERS];
        Sums *to = second ? odd : sums;
        for (int j = 0; j < registers; j++) {
            vu words = load_words(weight + pairs_at(j * SIMD_WIDTH));
            numbers[j] = second ? high_half(words) : low_half(words);
        }
        for (int r = 0; r < rows; r++) {
            vu inputs = broadcast_pair(x[r] + at);
            vf input = second ? high_half(inputs) : low_half(inputs);
            for (int j = 0; j < registers; j++) to->of[r][j] = simd_fma(input, numbers[j], to->of[r][j]);
        }
    }
}
#endif

/* Adds the products of the last input of each row if the number of inputs is odd. The missing second input is a
 * zero. */
INLINE void add_single(const char *weight, const char *const *x, long at, Sums *sums, Sums *odd, const int rows,
                       const int registers) {
    const char *last[STRIP_ROWS];
    char single[STRIP_ROWS][4];
    for (int r = 0; r < rows; r++) {
        memset(single[r], 0, sizeof single[r]);
        last[r] = memcpy(single[r], x[r] + at, 2);
    }
    add_pair(weight, last, 0, sums, odd, rows, registers);
}

/* Adds the products of inputs [from, to) of each row, which belong to one k-step. step: the k-step's pairs */
INLINE void add_step(const char *step, const char *const *x, long from, long to, Sums *sums, Sums *odd, const int rows,
                     const int registers) {
    long pairs = (to - from) / 2;
    for (long pair = 0; pair < pairs; pair++) {
        prefetch_pair(step, pair, pairs, registers * SIMD_WIDTH == PANEL);
        add_pair(step + pair * HALF_PANEL * 4, x, from * 2 + pair * 4, sums, odd, rows, registers);
    }
    if ((to - from) % 2) add_single(step + pairs * HALF_PANEL * 4, x, (to - 1) * 2, sums, odd, rows, registers);
}

/* Adds the products of k inputs. With IN_TILES, each k-step sums even and odd inputs separately, as TDPBF16PS does. */
INLINE void add_steps(const char *panel, const char *const *x, long k, Sums *sums, const int rows,
                      const int registers) {
    for (long from = 0; from < k; from += K_STEP, panel += K_STEP * PANEL * 2) {
        long to = from + K_STEP < k ? from + K_STEP : k;
#ifdef IN_TILES
        Sums even, odd;
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < registers; j++) even.of[r][j] = odd.of[r][j] = broadcast(0);
        add_step(panel, x, from, to, &even, &odd, rows, registers);
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < registers; j++) sums->of[r][j] += even.of[r][j] + odd.of[r][j];
#else
        add_step(panel, x, from, to, sums, sums, rows, registers);
#endif
    }
}

/* Adds the products of fp32 inputs. weight: [inputs][32 columns] */
INLINE void add_inputs(const float *weight, const char *const *x, long inputs, Sums *sums, const int rows,
                       const int registers) {
    for (long k = 0; k < inputs; k++, weight += PANEL) {
        vf numbers[REGISTERS];
        for (int j = 0; j < registers; j++) {
            numbers[j] = load_f32(weight + j * SIMD_WIDTH);
            if (j * SIMD_WIDTH % HALF_PANEL == 0) prefetch((const char *)(weight + j * SIMD_WIDTH));
        }
        for (int r = 0; r < rows; r++) {
            vf input = broadcast(((const float *)x[r])[k]);
            for (int j = 0; j < registers; j++) sums->of[r][j] = simd_fma(input, numbers[j], sums->of[r][j]);
        }
    }
}

/* Computes the sums of `registers` registers of columns, from `column` on. Only the first k inputs of each row are
 * read: the products of all further inputs are zeros. */
INLINE void multiply_columns(const Weight *w, long column, const char *const *x, long k, Sums *sums, const int rows,
                             const int registers, const int is_bf16) {
    long depth = is_bf16 ? (w->k + K_STEP - 1) / K_STEP * K_STEP : w->k, panel = column / PANEL;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sums->of[r][j] = broadcast(0);
    if (!is_bf16) {
        add_inputs((const float *)w->panels + panel * depth * PANEL + column % PANEL, x, k, sums, rows, registers);
        return;
    }
    const char *at = w->panels + panel * depth * PANEL * 2 + pairs_at(column % PANEL);
    add_steps(at, x, k, sums, rows, registers);
}

/* Computes `registers` registers of x A, from `column` on, for each row, and stores them in c->low. */
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

/* Adds COLUMNS columns of a part, from `column` on, to the outputs of a strip of rows, from `row` on. */
INLINE void add_strip(const Change *c, const ProductPart *part, long column, long row, const int rows,
                      const int is_bf16) {
    long size = is_bf16 ? 2 : 4, row_bytes = count_columns(c->job->weights) * size, n = part->b->n;
    char *out = c->job->out + part->column * size;
    const int64_t *places = c->rows->rows + row;
    const char *x[STRIP_ROWS];
    Sums sums;
    for (int r = 0; r < rows; r++) {
        x[r] = c->low + ((row + r) * c->product->a->n + part->first_rank) * size;
        /* the outputs of different rows are in different cache lines */
        if (rows > 1) __builtin_prefetch(out + places[r] * row_bytes + column * size, 1, 3);
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
#define BEGIN unsigned mode = _mm_getcsr(); _mm_setcsr(mode | 0x8040) /* treats denormals as zeros, as AMX tiles do */
#define END _mm_setcsr(mode)
#else
#define BEGIN
#define END
#endif

/* A function is compiled for each count of rows, so that its sums stay in registers. */
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
