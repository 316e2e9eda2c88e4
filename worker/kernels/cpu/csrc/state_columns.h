/* States of recurrent layers: matrices [keys, values], whose columns are independent of each other.
 *
 * COLUMNS columns of a state are next to each other in memory, so that a thread keeps them in its L1 cache while it
 * advances them token by token. Sums over keys have one order of additions, whatever the number of tokens. */
#pragma once
#include "simd.h"
#include <math.h>

#define COLUMNS 32 /* columns of a state that are next to each other in memory */
#define VECTORS (COLUMNS / SIMD_WIDTH)
#define PARTS (SIMD_WIDTH / 4) /* as many as the registers hold */
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

/* Sums over keys, in PARTS independent chains that hide the latency of multiply-adds. */
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
