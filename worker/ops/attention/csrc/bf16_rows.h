/* Functions that the two bf16 attention kernels share. They use 512-bit registers. */
#pragma once
#include "attention_rows.h"

#define LOG2_E 1.44269504f

INLINE long head_dim_steps(const AttentionArgs *a) { return (a->d + 31) / 32; }

INLINE __mmask32 column_mask(long d, long from) {
    return d - from >= 32 ? 0xffffffffu : d <= from ? 0 : (1u << (d - from)) - 1;
}

/* Returns a query, rotated if keys are rotated. buffer [MAX_HEAD_DIM]: for the result */
INLINE const bf16 *query_for_keys(const AttentionArgs *a, const bf16 *q, bf16 *buffer) {
    float rotated[MAX_HEAD_DIM + SIMD_WIDTH];
    if (!is_rotated(a->kv_format)) return q;
    rotate_query(a, (const char *)q, rotated);
    for (long i = 0; i < a->d; i += SIMD_WIDTH) store(buffer, i, a->d, load_f32(rotated + i), 1);
    return buffer;
}

/* As `multiples`, in bf16, and twice: [m][n + 16] is [m][n]. */
#define SIZE_OF(n) ((n) < 0 ? -(n) : (n))
#define TOP_BIT(n) (31 - __builtin_clz(SIZE_OF(n) | 1))
#define BF16_OF(n) ((n) ? ((n) < 0) << 15 | (127 + TOP_BIT(n)) << 7 | (SIZE_OF(n) << 7 >> TOP_BIT(n) & 127) : 0)
#define BF16_UP(m) 0, BF16_OF(m), BF16_OF(2 * m), BF16_OF(3 * m), BF16_OF(4 * m), BF16_OF(5 * m), BF16_OF(6 * m), \
    BF16_OF(7 * m)
#define BF16_DOWN(m) BF16_OF(-8 * m), BF16_OF(-7 * m), BF16_OF(-6 * m), BF16_OF(-5 * m), BF16_OF(-4 * m), \
    BF16_OF(-3 * m), BF16_OF(-2 * m), BF16_OF(-1 * m)
#define BF16_MULTIPLES(m) {BF16_UP((m)), BF16_DOWN((m)), BF16_UP((m)), BF16_DOWN((m))}
static const _Alignas(64) uint16_t bf16_multiples[32][32] = FOR_MULTIPLIERS(BF16_MULTIPLES);

/* Loads elements [from, from + 32) of a row in four bits as bf16. `from` is a multiple of GROUP. */
INLINE __m512i load_32_of_four_bits(const char *row, long d, long from) {
    const char *at = row + from / 2;
    __mmask16 mask = (1u << min_long(16, (d - from + 1) / 2)) - 1;
    PackedCodes packed = d - from >= 32 ? load_packed_codes(at) : _mm_maskz_loadu_epi8(mask, at);
    /* the low four bits of each half of a 32-bit element become a code; the bits above them do not matter */
    __m512i pairs = _mm512_cvtepu8_epi32(packed);
    pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
    return _mm512_permutexvar_epi16(pairs, _mm512_load_si512(bf16_multiples[multiplier_of(row, d, from)]));
}

/* Loads elements [from, from + 32) of a cached head as bf16, with zeros beyond d. Codes are converted; the results of
 * FP8 codes are their values divided by FP8_FACTOR. */
INLINE __m512i load_32(const char *row, long d, long from, const int row_format) {
    __mmask32 mask = column_mask(d, from);
    if (!has_codes(row_format)) return _mm512_maskz_loadu_epi16(mask, row + from * 2);
    if (row_format == KV_INT4) return load_32_of_four_bits(row, d, from);
    vf x[2];
    Codes codes = d - from >= 32 ? load_codes(row + from) : _mm256_maskz_loadu_epi8(mask, row + from);
    widen_codes(codes, x, row_format);
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
}

/* Calls an inlined function with the cache's format as a compile-time constant. */
#define WITH_KV_FORMAT(function, ...)                                   \
    switch (a->kv_format) {                                             \
        case KV_INT8: function(__VA_ARGS__, KV_INT8); break;            \
        case KV_FP8: function(__VA_ARGS__, KV_FP8); break;              \
        case KV_INT4: function(__VA_ARGS__, KV_INT4); break;            \
        default: function(__VA_ARGS__, KV_PLAIN);                       \
    }

/* Interleaves elements [from, from + 32) of the values of two keys. out[0] has the pairs of the first 16 columns,
 * out[1] the pairs of the last 16. */
INLINE void interleave_32(const char *even, const char *odd, long d, long from, __m512i out[2], const int kv_format) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i x = even ? load_32(even, d, from, kv_format) : _mm512_setzero_si512();
    __m512i y = odd ? load_32(odd, d, from, kv_format) : _mm512_setzero_si512();
    out[0] = _mm512_permutex2var_epi16(x, low, y), out[1] = _mm512_permutex2var_epi16(x, high, y);
}

/* Transposes a 16 x 16 matrix of 32-bit elements. */
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

/* Returns 2^x with a relative error of 3e-6 (weights are rounded to bf16 afterwards); the result for 0 is exactly 1. */
INLINE __m512 simd_exp2(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(9.58285299e-3f), _mm512_set1_ps(5.59064247e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40240986e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93124193e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Returns tanh(x) = 1 - 2 / (e^2x + 1) with an absolute error below 3e-6, without a division. */
INLINE __m512 bf16_tanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    x = _mm512_min_ps(_mm512_set1_ps(30.0f), x); /* tanh(30) rounds to 1, and e^60 is finite */
    __m512 below = _mm512_add_ps(simd_exp2(_mm512_mul_ps(x, _mm512_set1_ps(2 * LOG2_E))), one);
    __m512 inverse = _mm512_rcp14_ps(below);
    inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(below, inverse, two));
    return _mm512_fnmadd_ps(two, inverse, one);
}

INLINE vf state_exp(vf x) { return (vf)simd_exp2((__m512)x); }
INLINE vf to_state(vf logits) { return logits * LOG2_E; }

static void store_rows(const AttentionArgs *a, const Tile *tile, const SoftmaxState *state, const WorkItem *item) {
    long group = group_size(a), padded_d = pad_to_16(a->d);
    float buffer[MAX_HEAD_DIM + OUT_STEP];
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->query_start_loc[item->seq] + row / group,
             head = tile->head * group + row % group;
        bf16 *out = (bf16 *)a->out + (token * a->heads + head) * a->d;
        const float *sums = rotated_back(a, state->out + i * padded_d, buffer);
        /* adding 0 makes a zero positive: its sign depends on which denormals were flushed */
        vf inverse = broadcast(1.0f / state->sum[i]);
        for (long j = 0; j < a->d; j += SIMD_WIDTH)
            store(out, j, a->d, load_f32(sums + j) * inverse + 0.0f, 1);
    }
}
