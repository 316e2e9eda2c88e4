/* What the kernels of bf16 attention share: outputs are rows, State.out is [16 rows][D padded to 16]. */
#pragma once
#define ROWS 16
/* Neighbouring heads are read in one go even where sequences are few, as long as every thread gets some items. */
#define FEW_HEADS most(1, least(a->kv_heads * a->seqs / (4 * threads), ITEM_TILES / tiles))
#include "attention/attention.h"

INLINE long steps_of(const AttentionArgs *a) { return (a->d + 31) / 32; }

INLINE __mmask32 columns(long d, long from) {
    return d - from >= 32 ? 0xffffffffu : d <= from ? 0 : (1u << (d - from)) - 1;
}

/* rows[i] lane j <-> rows[j] lane i */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* 2^x for x <= 0, relative error 3e-6 (the weights are rounded to bf16 after); exactly 1 at 0. */
INLINE __m512 exp2_lanes(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(9.58285299e-3f), _mm512_set1_ps(5.59064247e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40240986e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93124193e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

SHARED void merge_span(const AttentionArgs *a, State *total, const State *span) {
    __m512 old = _mm512_loadu_ps(total->max), new = _mm512_loadu_ps(span->max), max = _mm512_max_ps(old, new);
    __m512 keep = exp2_lanes(_mm512_sub_ps(old, max)), add = exp2_lanes(_mm512_sub_ps(new, max));
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(total->sum), keep);
    float keeps[16], adds[16];
    _mm512_storeu_ps(total->max, max);
    _mm512_storeu_ps(total->sum, _mm512_fmadd_ps(_mm512_loadu_ps(span->sum), add, sum));
    _mm512_storeu_ps(keeps, keep);
    _mm512_storeu_ps(adds, add);
    long wide = padded(a->d);
    for (int row = 0; row < 16; row++)
        for (long i = row * wide; i < (row + 1) * wide; i += 16) {
            __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(total->out + i), _mm512_set1_ps(keeps[row]));
            __m512 both = _mm512_fmadd_ps(_mm512_loadu_ps(span->out + i), _mm512_set1_ps(adds[row]), kept);
            _mm512_storeu_ps(total->out + i, both);
        }
}

static void put_rows(const AttentionArgs *a, const Tile *tile, const State *state, const Item *item) {
    long group = group_of(a), wide = padded(a->d);
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->starts[item->seq] + row / group, head = tile->head * group + row % group;
        bf16 *out = (bf16 *)a->out + (token * a->heads + head) * a->d;
        /* + 0: no sign on a zero, whatever was flushed on the way */
        vf inverse = splat(1.0f / state->sum[i]);
        for (long j = 0; j < a->d; j += LANES)
            store(out, j, a->d, load_f32(state->out + i * wide + j) * inverse + 0.0f, 1);
    }
}
