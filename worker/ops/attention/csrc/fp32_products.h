/* The two products of the fp32 kernel: scores (q times keys) and outputs (weights times values). */
#pragma once
#include "attention_rows.h"
#include "fp32_blocks.h"

#define MAX_ROWS_IN_PLACE 4 /* a block is packed for more rows than this */
#if SIMD_WIDTH == 16
#define MAX_SCORE_ROWS 6 /* the most rows whose scores are computed at once: a row takes 4 registers */
#define MAX_SUMS 16      /* registers for sums; the other registers are needed to convert keys to fp32 */
#define MAX_STEPS 4      /* the most pairs of output registers for each row with up to FEW_ROWS rows; with more rows,
                            half as many */
#define FEW_ROWS 3
#else
#define MAX_SCORE_ROWS 2
#define MAX_SUMS 8
#define MAX_STEPS 2
#define FEW_ROWS 2
#endif
#define MAX_VALUE_ROWS 6

/* Adds up groups of 4 elements of four registers: element 4 * i + j of the result is the sum of group i of x[j]. */
INLINE vf add_quarters(const vf x[4]) {
#if SIMD_WIDTH == 16
#define UNPACK(type, half, a, b) (vf) _mm512_unpack##half##_##type((__m512##type)(a), (__m512##type)(b))
#define __m512ps __m512
#define __m512pd __m512d
#else
#define UNPACK(type, half, a, b) (vf) _mm256_unpack##half##_##type((__m256##type)(a), (__m256##type)(b))
#define __m256ps __m256
#define __m256pd __m256d
#endif
    vf a = UNPACK(ps, lo, x[0], x[1]) + UNPACK(ps, hi, x[0], x[1]);
    vf b = UNPACK(ps, lo, x[2], x[3]) + UNPACK(ps, hi, x[2], x[3]);
    return UNPACK(pd, lo, a, b) + UNPACK(pd, hi, a, b);
}

/* Returns a register that repeats the 4 floats at p. */
INLINE vf repeat_quad(const float *p) {
#if SIMD_WIDTH == 16
    return (vf)_mm512_broadcast_f32x4(_mm_loadu_ps(p));
#else
    return (vf)_mm256_broadcast_ps((const __m128 *)p);
#endif
}

/* One head's keys of a block. */
typedef struct {
    const char *first; /* the address of key 0 of the block, even if this key does not exist */
    long stride;       /* bytes from key to key */
    long chunks;
    Prefetch *prefetch;
} Keys;

/* Computes the scores of SIMD_WIDTH keys, from `first` on: scores[rows][BLOCK_KEYS] = q k^T. */
INLINE void score_packed(const float *q, const Keys *keys, long first, float *scores, const int rows) {
    const long q_stride = keys->chunks * CHUNK;
    const float *k = (const float *)keys->first + first * q_stride;
    vf sum[MAX_SCORE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < 4; g++) sum[r][g] = broadcast(0);
    for (long i = 0; i < q_stride; i += 4, k += 4 * SIMD_WIDTH)
        for (int r = 0; r < rows; r++) {
            vf x = repeat_quad(q + r * q_stride + i);
            for (int g = 0; g < 4; g++) sum[r][g] += x * load_f32(k + g * SIMD_WIDTH);
        }
    for (int r = 0; r < rows; r++) store_f32(scores + r * BLOCK_KEYS + first, add_quarters(sum[r]));
}

/* Computes the scores of SIMD_WIDTH keys, from `first` on, from keys in their page. If the sums of so many rows do not
 * fit in registers, it computes one half of the keys after the other. */
INLINE void score_in_place(const float *q, const Keys *keys, long first, float *scores, const int rows,
                           const int format) {
    const int groups = rows <= MAX_SUMS / 4 ? 4 : 2;
    const long q_stride = keys->chunks * CHUNK, size = bytes_of(CHUNK, format);
    vf sum[MAX_ROWS_IN_PLACE][4];
    for (int from = 0; from < 4; from += groups) {
        const char *k = keys->first + (first + from) * keys->stride;
        for (int r = 0; r < rows; r++)
            for (int g = from; g < from + groups; g++) sum[r][g] = broadcast(0);
        for (long i = 0; i < q_stride; i += CHUNK, k += size) {
            prefetch_lines(keys->prefetch, SIMD_WIDTH / 4 * groups * size / 64);
            for (int g = 0; g < groups; g++) {
                vf x[2];
                load_keys(k + g * keys->stride, 4 * keys->stride, x, format);
                for (int half = 0; half < 2; half++)
                    for (int r = 0; r < rows; r++)
                        sum[r][from + g] += repeat_quad(q + r * q_stride + i + 4 * half) * x[half];
            }
        }
    }
    for (int r = 0; r < rows; r++) store_f32(scores + r * BLOCK_KEYS + first, add_quarters(sum[r]));
}

/* Computes the scores of packed keys [from, to) for all rows. Each group of SIMD_WIDTH keys stays in the L1 cache while
 * all rows use it. */
static void score_tile(const Keys *keys, Tile *tile, long from, long to) {
    int parts = (tile->rows + MAX_SCORE_ROWS - 1) / MAX_SCORE_ROWS;
    for (long first = from / SIMD_WIDTH * SIMD_WIDTH; first < to; first += SIMD_WIDTH)
        for (int part = 0, row = 0, end; part < parts; part++, row = end) {
            end = (part + 1) * tile->rows / parts;
            const float *q = (const float *)tile->q + row * keys->chunks * CHUNK;
            float *scores = tile->weights + row * BLOCK_KEYS;
            switch (end - row) {
#define CASE(r) \
    case r: score_packed(q, keys, first, scores, r < MAX_SCORE_ROWS ? r : MAX_SCORE_ROWS); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
            }
        }
}

/* Computes the scores of SIMD_WIDTH keys for all rows from keys in their page. */
INLINE void score_tile_in_place(const Keys *keys, Tile *tile, long first, const int format) {
    switch (tile->rows) {
#define CASE(r) \
    case r: score_in_place((const float *)tile->q, keys, first, tile->weights, r, format); break;
        CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
    }
}

/* One head's values of a block. */
typedef struct {
    const char *rows[BLOCK_KEYS];
    long from, to;  /* the keys that at least one row of the tile sees: [from, to) */
    long step_size; /* bytes from STEP elements of a value to the next STEP elements */
    long d;         /* elements of a value; only values in four bits need it */
    Prefetch *prefetch;
} Values;

/* Computes `steps` steps of the outputs, from step `first` on: out = out * rescale + weights times values. */
INLINE void accumulate_steps(const Values *v, long first, const float *weights, float *out, long stride,
                             const float *rescale, const int steps, const int rows, const int format) {
    const long size = bytes_of(steps * STEP, format);
    vf sum[MAX_VALUE_ROWS][2 * MAX_STEPS];
    out += first * STEP;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2 * steps; j++) sum[r][j] = load_f32(out + r * stride + j * SIMD_WIDTH) * rescale[r];
    for (long i = v->from; i < v->to; i++) {
        const char *value = v->rows[i] + first * v->step_size;
        if (format != PACKED && (size >= 64 || i % 2)) prefetch_lines(v->prefetch, (size + 63) / 64);
        for (int s = 0; s < steps; s++) {
            vf x[2];
            uint8_t multiplier = format == INT4 ? multiplier_of(v->rows[i], v->d, (first + s) * STEP) : 0;
            load_step(value + s * v->step_size, multiplier, x, format);
            for (int r = 0; r < rows; r++)
                for (int half = 0; half < 2; half++) sum[r][2 * s + half] += weights[r * BLOCK_KEYS + i] * x[half];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2 * steps; j++) store_f32(out + r * stride + j * SIMD_WIDTH, sum[r][j]);
}

/* Computes the outputs of up to MAX_VALUE_ROWS rows, in pieces of STEP columns, as many at once as registers allow. */
INLINE void accumulate_rows(const Values *v, const float *weights, float *out, long stride, const float *rescale,
                            int rows, const int format) {
    const int most_rows = format == PACKED ? MAX_VALUE_ROWS : MAX_ROWS_IN_PLACE;
    for (long i = 0, steps = stride / STEP, n; i < steps; i += n) {
        long most = rows <= FEW_ROWS ? MAX_STEPS : MAX_STEPS / 2;
        for (n = most; n > steps - i; n /= 2);
        switch (rows + n * 8) {
#define CASE(r, s) \
    case r + s * 8: \
        if (r <= most_rows && s <= MAX_STEPS / (r <= FEW_ROWS ? 1 : 2)) \
            accumulate_steps(v, i, weights, out, stride, rescale, s, r, format); \
        break;
#define CASES(s) CASE(1, s) CASE(2, s) CASE(3, s) CASE(4, s) CASE(5, s) CASE(6, s)
            CASES(1) CASES(2) CASES(4)
#undef CASES
#undef CASE
        }
    }
}

INLINE void accumulate_values(const AttentionArgs *a, const Values *v, Tile *tile, const float *rescale,
                              const int format) {
    int parts = (tile->rows + MAX_VALUE_ROWS - 1) / MAX_VALUE_ROWS;
    long stride = out_stride(a);
    for (int part = 0, row = 0, end; part < parts; part++, row = end) {
        end = (part + 1) * tile->rows / parts;
        accumulate_rows(v, tile->weights + row * BLOCK_KEYS, tile->split.out + row * stride, stride, rescale + row,
                        end - row, format);
    }
}
