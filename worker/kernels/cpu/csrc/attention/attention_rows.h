/* Functions of the bf16 attention kernels, whose outputs are rows: SoftmaxState.out is [16 rows][D padded to 16]. */
#pragma once
#define TILE_ROWS 16
/* Neighbouring heads are read together even when sequences are few, as long as every thread gets several items. */
#define MIN_ITEM_HEADS max_long(1, min_long(a->kv_heads * a->seqs / (4 * threads), MAX_ITEM_TILES / tiles))
#include "attention/attention.h"

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

NOINLINE void merge_split(const AttentionArgs *a, SoftmaxState *total, const SoftmaxState *split) {
    __m512 old = _mm512_loadu_ps(total->max), new = _mm512_loadu_ps(split->max), max = _mm512_max_ps(old, new);
    __m512 total_factor = simd_exp2(_mm512_sub_ps(old, max)), split_factor = simd_exp2(_mm512_sub_ps(new, max));
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(total->sum), total_factor);
    float total_factors[16], split_factors[16];
    _mm512_storeu_ps(total->max, max);
    _mm512_storeu_ps(total->sum, _mm512_fmadd_ps(_mm512_loadu_ps(split->sum), split_factor, sum));
    _mm512_storeu_ps(total_factors, total_factor);
    _mm512_storeu_ps(split_factors, split_factor);
    long padded_d = pad_to_16(a->d);
    for (int row = 0; row < 16; row++)
        for (long i = row * padded_d; i < (row + 1) * padded_d; i += 16) {
            __m512 rescaled = _mm512_mul_ps(_mm512_loadu_ps(total->out + i), _mm512_set1_ps(total_factors[row]));
            __m512 merged =
                _mm512_fmadd_ps(_mm512_loadu_ps(split->out + i), _mm512_set1_ps(split_factors[row]), rescaled);
            _mm512_storeu_ps(total->out + i, merged);
        }
}

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
