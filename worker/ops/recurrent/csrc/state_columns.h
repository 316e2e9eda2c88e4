/* The states of recurrent layers: matrices [keys, columns], whose columns are independent of each other.
 *
 * A block of COLUMNS columns is contiguous in memory, so a thread keeps it in its L1 cache while it advances the block
 * token by token. Sums over keys always have the same order of additions, for any number of tokens. */
#pragma once
#include "convolution.h"
#include <math.h>

#define COLUMNS 32 /* columns of a block; the same number is in worker/ops/recurrent_state.py */
#define VECTORS (COLUMNS / SIMD_WIDTH)
#define PARTS (SIMD_WIDTH / 4) /* independent chains of a sum: as many as fit in the registers */
#define UNROLLED _Pragma("GCC unroll 8")

INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE vf silu(vf x) { return x / (broadcast(1.0f) + simd_exp(-x)); }
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
INLINE float element(const char *row, long i, int is_bf16) {
    return is_bf16 ? bf16_to_float(((const bf16 *)row)[i]) : ((const float *)row)[i];
}

typedef struct {
    vf v[VECTORS];
} Row; /* COLUMNS numbers */

INLINE Row load_row(const float *p) {
    Row row;
    UNROLLED for (long j = 0; j < VECTORS; j++) row.v[j] = load_f32(p + j * SIMD_WIDTH);
    return row;
}

INLINE Row scaled_sum(float factor, Row x, Row y) {
    UNROLLED for (long j = 0; j < VECTORS; j++) y.v[j] += broadcast(factor) * x.v[j];
    return y;
}

/* The sums over keys of COLUMNS columns, in PARTS independent chains, which hide the latency of multiply-adds. */
typedef struct {
    Row part[PARTS];
} Sums;

INLINE Row total(const Sums *sums) {
    Row row = sums->part[0];
    UNROLLED for (long part = 1; part < PARTS; part++)
        UNROLLED for (long j = 0; j < VECTORS; j++) row.v[j] += sums->part[part].v[j];
    return row;
}

/* Returns the sums over keys of state[key] * factor[key]. */
INLINE Row recall(const float *state, const float *factor, long key_dim) {
    Sums sums = {0};
    long key = 0;
    for (; key + PARTS <= key_dim; key += PARTS)
        UNROLLED for (long i = 0; i < PARTS; i++)
            sums.part[i] = scaled_sum(factor[key + i], load_row(state + (key + i) * COLUMNS), sums.part[i]);
    for (; key < key_dim; key++) sums.part[0] = scaled_sum(factor[key], load_row(state + key * COLUMNS), sums.part[0]);
    return total(&sums);
}

INLINE Row advance_row(const float *from, float *to, float decay, float key, Row delta) {
    Row row = load_row(from);
    UNROLLED for (long j = 0; j < VECTORS; j++) {
        row.v[j] = row.v[j] * broadcast(decay) + broadcast(key) * delta.v[j];
        store_f32(to + j * SIMD_WIDTH, row.v[j]);
    }
    return row;
}

/* Sets to = from * decay + key * delta, and returns the sums over keys of to[key] * query[key]. */
INLINE Row advance(const float *from, float *to, float decay, const float *key, Row delta, const float *query,
                   long key_dim) {
    Sums sums = {0};
    long at = 0;
    for (; at + PARTS <= key_dim; at += PARTS)
        UNROLLED for (long i = 0; i < PARTS; i++) {
            long row = (at + i) * COLUMNS;
            sums.part[i] = scaled_sum(query[at + i], advance_row(from + row, to + row, decay, key[at + i], delta),
                                      sums.part[i]);
        }
    for (; at < key_dim; at++)
        sums.part[0] = scaled_sum(query[at], advance_row(from + at * COLUMNS, to + at * COLUMNS, decay, key[at], delta),
                                  sums.part[0]);
    return total(&sums);
}

INLINE long blocks_of(const MatrixLayer *l) { return (l->columns + COLUMNS - 1) / COLUMNS; }
INLINE long values_width(const MatrixLayer *l) { return l->heads * l->columns; }

/* Returns a row's rates [2, heads]: first the decay of each head's state, then the factor of each head's update. */
INLINE float *rates_of(const MatrixLayer *l, const RecurrentStep *s, long row) {
    return s->scratch + row * 2 * l->heads;
}

/* Returns a row's results of the convolution [channels]. The layer later overwrites the part that holds the values (v
 * or x) by its output. */
INLINE float *mixed_of(const MatrixLayer *l, const RecurrentStep *s, long row) {
    return s->scratch + rows_of(s) * 2 * l->heads + row * l->channels;
}

INLINE Convolution convolution_of(const MatrixLayer *l, const RecurrentStep *s, long size) {
    return (Convolution){s->projected + l->first * size, l->width * size, l->channels * size, l->tails, l->conv,
                         l->taps, l->channels, s};
}

/* A block of COLUMNS columns, from column `first` on, of the state of one sequence and head. Only the first `count`
 * columns exist; the others are padding. */
typedef struct {
    const float *from; /* the state before the step */
    float *to;         /* the state after the step */
    long first, count;
} Block;

INLINE Block block_of(const MatrixLayer *l, const RecurrentStep *s, long seq, long head, long block) {
    long size = l->keys * COLUMNS, state = l->heads * blocks_of(l) * size, at = (head * blocks_of(l) + block) * size;
    long slot = s->read_slots[seq], first = block * COLUMNS;
    float *to = l->memories + s->write_slots[seq] * state + at;
    const float *from = slot < 0 ? memset(to, 0, size * sizeof(float)) : l->memories + slot * state + at;
    return (Block){from, to, first, min_long(COLUMNS, l->columns - first)};
}

/* Defines the kernel of a layer from the functions mix_row, advance_block and norm_row. The struct `Layer` must begin
 * with a MatrixLayer `layer`. */
#define MATRIX_LAYER(name, Layer, dtype, is_bf16)                                                                  \
    NOINLINE void mix_row_##dtype(const Layer *n, const Convolution *c, long row) { mix_row(n, c, row, is_bf16); }   \
    NOINLINE void norm_row_##dtype(const Layer *n, const RecurrentStep *s, long row) {                               \
        norm_row(n, s, row, is_bf16);                                                                                \
    }                                                                                                                \
    EXPORT(name##_##dtype)(const Layer *n, const RecurrentStep *s) {                                                 \
        const MatrixLayer *l = &n->layer;                                                                            \
        long rows = rows_of(s), blocks = s->seqs * l->heads * blocks_of(l);                                          \
        Convolution c = convolution_of(l, s, is_bf16 ? 2 : 4);                                                       \
        _Pragma("omp parallel num_threads(s->threads)") {                                                            \
            _Pragma("omp for") for (long row = 0; row < rows; row++) mix_row_##dtype(n, &c, row);                    \
            _Pragma("omp for nowait") for (long seq = 0; seq < s->seqs; seq++) keep_tail(&c, seq);                   \
            _Pragma("omp for schedule(dynamic)") for (long unit = 0; unit < blocks; unit++) {                        \
                long head = unit / blocks_of(l), seq = head / l->heads;                                              \
                if (s->query_start_loc[seq] < s->query_start_loc[seq + 1])                                           \
                    advance_block(n, s, seq, head % l->heads, unit % blocks_of(l));                                  \
            }                                                                                                        \
            _Pragma("omp for") for (long row = 0; row < rows; row++) norm_row_##dtype(n, s, row);                    \
        }                                                                                                            \
    }
