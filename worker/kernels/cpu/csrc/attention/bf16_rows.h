/* Functions of the bf16 attention kernels, which work on 512-bit registers. */
#pragma once
#include "attention/attention_rows.h"

INLINE long head_dim_steps(const AttentionArgs *a) { return (a->d + 31) / 32; }

INLINE __mmask32 column_mask(long d, long from) {
    return d - from >= 32 ? 0xffffffffu : d <= from ? 0 : (1u << (d - from)) - 1;
}

/* Swaps element j of row i with element i of row j. */
INLINE void transpose_16x16(__m512i r[16]) {
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

/* Returns 2^x for x <= 0, with a relative error of 3e-6 (weights are rounded to bf16 afterwards); exactly 1 at 0. */
INLINE __m512 simd_exp2(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(9.58285299e-3f), _mm512_set1_ps(5.59064247e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40240986e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93124193e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

INLINE vf state_exp(vf x) { return (vf)simd_exp2((__m512)x); }

static void store_rows(const AttentionArgs *a, const Tile *tile, const SoftmaxState *state, const WorkItem *item) {
    long group = group_size(a), padded_d = pad_to_16(a->d);
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->query_start_loc[item->seq] + row / group,
             head = tile->head * group + row % group;
        bf16 *out = (bf16 *)a->out + (token * a->heads + head) * a->d;
        /* + 0 removes the sign of a zero, which depends on flushed denormals */
        vf inverse = broadcast(1.0f / state->sum[i]);
        for (long j = 0; j < a->d; j += SIMD_WIDTH)
            store(out, j, a->d, load_f32(state->out + i * padded_d + j) * inverse + 0.0f, 1);
    }
}
