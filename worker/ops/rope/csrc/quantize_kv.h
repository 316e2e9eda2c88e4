/* Writes keys and values to the KV cache: quantization of a row, and the interleaving of values. */
#pragma once
#include "kv_format.h"
#include "model_limits.h"
#include "rows.h"
#include <string.h>

#define TRIED_MULTIPLIERS 4
#define TINY_ROW 1e-30f /* a row whose largest magnitude is smaller becomes zeros */

typedef uint8_t Bytes __attribute__((vector_size(SIMD_WIDTH)));

INLINE vu absolute_bits(vf x) { return as_bits(x) & 0x7fffffffu; }

/* Returns the largest absolute value of d elements. It is NaN or infinity if one of them is. */
INLINE float largest_of(const void *x, long d, int is_bf16) {
    vu most = {0};
    uint32_t top = 0;
    for (long i = 0; i < d; i += SIMD_WIDTH) {
        vu bits = absolute_bits(load(x, i, d, is_bf16));
        most = (vu)simd_select((vi)bits > (vi)most, as_float(bits), as_float(most));
    }
    for (int i = 0; i < SIMD_WIDTH; i++) top = most[i] > top ? most[i] : top;
    float largest;
    __builtin_memcpy(&largest, &top, sizeof largest);
    return largest;
}

/* Rounds x, |x| < 2^21, to an integer (half to even). The low bits of the result are the integer's two's complement. */
INLINE vu round_to_integer(vf x) { return as_bits(x + 12582912.0f); }

/* Returns the int8 codes of x, clamped to [-127, 127]. A NaN becomes -127 or 127. */
INLINE vu int8_codes(vf x) { return round_to_integer(simd_max(simd_min(x, broadcast(127)), broadcast(-127))); }

/* Returns the e4m3 codes of x, clamped to [-448, 448] and rounded to nearest even. Below 2^-6, e4m3 numbers are
 * multiples of 2^-9. */
INLINE vu fp8_codes(vf x) {
    x = simd_max(simd_min(x, broadcast(448)), broadcast(-448));
    vu bits = absolute_bits(x), sign = as_bits(x) >> 24 & 0x80;
    vu normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    vu small = round_to_integer(as_float(bits) * 512) & 0xf;
    return sign | (vu)simd_select((vi)(bits < 0x3c800000u), as_float(small), as_float(normal));
}

/* Writes a row, less the centre unless that is NULL, divided by the length of a block and rotated, to rotated
 * [MAX_HEAD_DIM + SIMD_WIDTH]. */
INLINE void rotate_row(const void *x, const float *centre, float *rotated, long d, int is_bf16) {
    for (long i = 0; i < d; i += SIMD_WIDTH) {
        vf own = load(x, i, d, is_bf16);
        if (centre) own -= load(centre, i, d, 0);
        store_f32(rotated + i, own / (float)(d & -d));
    }
    rotate_blocks(rotated, d);
}

/* Quantizes a row to D codes of eight bits and their scale. */
INLINE void quantize_to_eight_bits(const void *x, char *row, long d, int is_bf16, const int kv_format) {
    float limit = kv_format == KV_INT8 ? 127 : 448, largest = largest_of(x, d, is_bf16);
    float scale = largest < TINY_ROW ? 0 : largest / limit, inverse = largest < TINY_ROW ? 0 : limit / largest;
    for (long i = 0; i < d; i += SIMD_WIDTH) {
        vf scaled = load(x, i, d, is_bf16) * inverse;
        Bytes codes = __builtin_convertvector(kv_format == KV_INT8 ? int8_codes(scaled) : fp8_codes(scaled), Bytes);
        memcpy(row + i, &codes, d - i < SIMD_WIDTH ? d - i : SIMD_WIDTH);
    }
    memcpy(row + d, &scale, sizeof scale);
}

/* Quantizes a row to int8 or fp8, with the same result as quantize_rows in paged_kv.py. centre [d]: is subtracted from
 * the row first, only in int8; may be NULL */
INLINE void quantize_row(const void *x, const float *centre, char *row, long d, int is_bf16, const int kv_format) {
    float rotated[MAX_HEAD_DIM + SIMD_WIDTH];
    if (!is_rotated(kv_format)) {
        quantize_to_eight_bits(x, row, d, is_bf16, kv_format);
        return;
    }
    rotate_row(x, centre, rotated, d, is_bf16);
    quantize_to_eight_bits(rotated, row, d, 0, kv_format);
}

/* Divides the elements of a group by a multiplier and rounds them to codes of four bits. Returns the sum of squares of
 * the errors, which is exact: v [GROUP] are integers below 2^7. */
INLINE float codes_of_four_bits(const float *v, float multiplier, uint8_t *codes) {
    vf errors = broadcast(0), inverse = broadcast(1.0f / multiplier);
    for (long i = 0; i < GROUP; i += SIMD_WIDTH) {
        vf x = load_f32(v + i), divided = rounded_product(x, inverse);
        vu bits = round_to_integer(simd_max(simd_min(divided, broadcast(MOST_OF_FOUR)), broadcast(LEAST_OF_FOUR)));
        vf error = x - (as_float(bits) - 12582912.0f) * multiplier;
        errors += error * error;
        Bytes own = __builtin_convertvector(bits & 15, Bytes);
        memcpy(codes + i, &own, sizeof own);
    }
    return simd_sum(errors);
}

/* Finds the multiplier of a group and its codes [GROUP]: the multiplier with the smallest error of those tried, which
 * are the smallest that limits no element, and some below it, with both signs. */
INLINE int8_t quantize_group(const float *v, uint8_t *codes) {
    float most = __builtin_ceilf(largest_of(v, GROUP, 0) / MOST_OF_FOUR), least = 0;
    int first = most >= 1 ? most < MOST_MULTIPLIER ? (int)most : MOST_MULTIPLIER : 1, best = 0;
    for (int i = 0; i < 2 * TRIED_MULTIPLIERS; i++) {
        int size = first - i / 2 > 1 ? first - i / 2 : 1, multiplier = i % 2 ? -size : size;
        uint8_t own[GROUP];
        float error = codes_of_four_bits(v, multiplier, own);
        if (best && !(error < least)) continue;
        best = multiplier, least = error;
        memcpy(codes, own, GROUP);
    }
    return best;
}

/* Quantizes a row to codes of four bits, multipliers and the scale, with the same result as quantize_rows in
 * paged_kv.py. */
INLINE void quantize_to_four_bits(const void *x, char *row, long d, int is_bf16) {
    const float most = -LEAST_OF_FOUR * MOST_MULTIPLIER;
    float rotated[MAX_HEAD_DIM + GROUP + SIMD_WIDTH];
    rotate_row(x, NULL, rotated, d, is_bf16);
    memset(rotated + d, 0, GROUP * sizeof(float)); /* the last group may go beyond the row */
    float largest = largest_of(rotated, d, 0);
    int tiny = largest < TINY_ROW;
    float scale = tiny ? 0 : largest / most, inverse = tiny ? 0 : most / largest;
    for (long from = 0; from < d; from += GROUP) {
        float v[GROUP];
        uint8_t codes[GROUP];
        for (long i = 0; i < GROUP; i += SIMD_WIDTH) {
            vf scaled = rounded_product(load_f32(rotated + from + i), broadcast(inverse));
            vf limited = simd_max(simd_min(scaled, broadcast(most)), broadcast(-most));
            store_f32(v + i, as_float(round_to_integer(limited)) - 12582912.0f);
        }
        int8_t multiplier = quantize_group(v, codes);
        for (long i = 0; i < GROUP && from + i < d; i += 2) row[(from + i) / 2] = codes[i] | codes[i + 1] << 4;
        row[multipliers_at(d) + from / GROUP] = tiny ? 0 : multiplier;
    }
    memcpy(row + kv_row_bytes(KV_INT4, d, 0) - SCALE_BYTES, &scale, sizeof scale);
}

/* Stores the values of a token in its slot. In memory they alternate with the elements of the neighbouring slot. */
INLINE void store_alternating_values(const char *v, char *cache_v, int64_t slot, size_t bytes) {
    uint16_t *to = (uint16_t *)(cache_v + (slot & ~1L) * bytes);
    size_t i = 0;
#if SIMD_WIDTH == 16 /* masked stores: another thread may be writing the neighbouring slot */
    __mmask32 mine = slot & 1 ? 0xaaaaaaaau : 0x55555555u;
    for (; i + SIMD_WIDTH <= bytes / 2; i += SIMD_WIDTH) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(v + 2 * i)));
        _mm512_mask_storeu_epi16(to + 2 * i, mine, _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
    }
#endif
    for (; i < bytes / 2; i++) to[2 * i + (slot & 1)] = ((const uint16_t *)v)[i];
}

/* Stores one token's keys k [heads][d] of bf16, whose pairs of elements lie beside those of its neighbours. */
INLINE void store_transposed_keys(const char *k, char *cache_k, int64_t slot, long heads, long d) {
    long together = slot % KEYS_TOGETHER;
    char *to = cache_k + (slot - together) * heads * d * 2 + together * 4;
    for (long i = 0; i < heads * d / 2; i++) __builtin_memcpy(to + i * KEYS_TOGETHER * 4, k + i * 4, 4);
}
