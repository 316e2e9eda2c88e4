/* The memory format of a row of the KV cache, and the conversion of codes to fp32. A row is the key or the value of one
 * head of one token.
 *
 * A row in eight bits is D codes and then their fp32 scale: element = code * scale. fp32 and bf16 represent codes
 * exactly, so attention multiplies the codes themselves. It multiplies the scores of a key by the key's scale, and the
 * softmax weights of a value by the value's scale.
 *
 * The elements of rows in int8 and in four bits are those after rotate_blocks, which spreads large elements over their
 * neighbours: the scale follows the largest element, so a few large ones would leave the others few codes. Attention
 * rotates each query, too, so its scores are those of the unrotated keys. Weighted sums of values are rotated back
 * once, when they are complete.
 *
 * A row in four bits is D codes, of which two share a byte, the first of them in the low bits; a signed multiplier for
 * each GROUP elements, one byte; and the scale: element = code * multiplier * scale, where code * multiplier is a code
 * in eight bits. */
#pragma once
#include "simd.h"

/* ops/paged_kv.py has the same numbers. KV_PAIRED: unquantized; the elements of the values of two neighbouring tokens
 * alternate in memory (v_is_paired). KV_TRANSPOSED: the same, and the keys of KEYS_TOGETHER neighbouring tokens are
 * transposed (k_is_transposed). KV_INT4: values are in four bits, and keys are rows of KV_INT8. */
enum { KV_PLAIN, KV_PAIRED, KV_TRANSPOSED, KV_INT8, KV_FP8, KV_INT4 };

#define KEYS_TOGETHER 32 /* how many keys are transposed together: [Hk][D / 2][KEYS_TOGETHER][2] */

#define SCALE_BYTES 4
#define GROUP 32           /* elements of a row in four bits that share a multiplier */
#define LEAST_OF_FOUR (-8) /* codes of four bits are in [-8, 7] */
#define MOST_OF_FOUR 7
#define MOST_MULTIPLIER 15 /* multipliers are in [-15, 15], so that products are codes of eight bits */

INLINE int pairs_values(const int kv_format) { return kv_format == KV_PAIRED || kv_format == KV_TRANSPOSED; }
INLINE int has_codes(const int kv_format) { return kv_format >= KV_INT8; }
INLINE int is_rotated(const int kv_format) { return kv_format == KV_INT8 || kv_format == KV_INT4; }

/* Returns the format of the rows of keys in a cache. The format of the rows of values is the cache's. */
INLINE int key_format(const int kv_format) { return kv_format == KV_INT4 ? KV_INT8 : kv_format; }

/* Returns the bytes before the multipliers of a row in four bits. */
INLINE long multipliers_at(long d) { return (d + 1) / 2; }

INLINE long kv_row_bytes(int row_format, long d, long element_size) {
    if (row_format == KV_INT4) return multipliers_at(d) + (d + GROUP - 1) / GROUP + SCALE_BYTES;
    return has_codes(row_format) ? d + SCALE_BYTES : d * element_size;
}

/* Returns the scale of a row of so many bytes. */
INLINE float row_scale(const char *row, long row_bytes) {
    float scale;
    __builtin_memcpy(&scale, row + row_bytes - SCALE_BYTES, sizeof scale);
    return scale;
}

/* A row for each multiplier, the negative ones at 32 + multiplier. Row 16 is not used. */
#define FOR_MULTIPLIERS(row)                                                                                          \
    {row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7), row(8), row(9), row(10), row(11), row(12),       \
     row(13), row(14), row(15), row(0), row(-15), row(-14), row(-13), row(-12), row(-11), row(-10), row(-9), row(-8), \
     row(-7), row(-6), row(-5), row(-4), row(-3), row(-2), row(-1)}

/* [m][n]: m times the code of four bits n, which is a two's complement. */
#define MULTIPLES(m)                                                                                                 \
    {0, (m), 2 * (m), 3 * (m), 4 * (m), 5 * (m), 6 * (m), 7 * (m), -8 * (m), -7 * (m), -6 * (m), -5 * (m), -4 * (m), \
     -3 * (m), -2 * (m), -(m)}
static const int8_t multiples[32][16] = FOR_MULTIPLIERS(MULTIPLES);

/* Replaces each pair of elements i and i + half of a register, where i has no bit `half`, by its sum and difference. */
INLINE vf sums_and_differences(vf x, const int half) {
#define AT(i) x[(i) ^ half]
#define EIGHT_FROM(i) AT(i), AT(i + 1), AT(i + 2), AT(i + 3), AT(i + 4), AT(i + 5), AT(i + 6), AT(i + 7)
#if SIMD_WIDTH == 16
    vf other = {EIGHT_FROM(0), EIGHT_FROM(8)};
#else
    vf other = {EIGHT_FROM(0)};
#endif
#undef EIGHT_FROM
#undef AT
    vu sign = {0};
    for (int i = 0; i < SIMD_WIDTH; i++) sign[i] = i & half ? 0x80000000u : 0;
    return other + as_float(as_bits(x) ^ sign);
}

/* Multiplies each block of a row by a Hadamard matrix. A block is as long as the largest power of two that divides d.
 * Twice this is a multiplication by the length of a block. Has the same bits with every SIMD_WIDTH. */
INLINE void rotate_blocks(float *row, long d) {
    const long block = d & -d;
    for (long half = 1; half < block && block < SIMD_WIDTH; half *= 2)
        for (long i = 0; i < d; i += 2 * half)
            for (long j = i; j < i + half; j++) {
                float x = row[j], y = row[j + half];
                row[j] = x + y, row[j + half] = x - y;
            }
    for (long i = 0; i < d && block >= SIMD_WIDTH; i += SIMD_WIDTH) {
        vf x = sums_and_differences(sums_and_differences(load_f32(row + i), 1), 2);
        x = sums_and_differences(x, 4);
#if SIMD_WIDTH == 16
        x = sums_and_differences(x, 8);
#endif
        store_f32(row + i, x);
    }
    for (long half = SIMD_WIDTH; half < block; half *= 2)
        for (long i = 0; i < d; i += 2 * half)
            for (long j = i; j < i + half; j += SIMD_WIDTH) {
                vf x = load_f32(row + j), y = load_f32(row + j + half);
                store_f32(row + j, x + y);
                store_f32(row + j + half, x - y);
            }
}

/* Codes: 2 * SIMD_WIDTH codes of eight bits; PackedCodes: as many of four bits */
#if SIMD_WIDTH == 16
typedef __m256i Codes;
typedef __m128i PackedCodes;
INLINE Codes load_codes(const char *from) { return _mm256_loadu_si256((const __m256i *)from); }
INLINE PackedCodes load_packed_codes(const char *from) { return _mm_loadu_si128((const __m128i *)from); }
INLINE Codes codes_of_group(PackedCodes packed, uint8_t multiplier) {
    __m256i x = _mm256_cvtepu8_epi16(packed);
    x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi16(x, 4)), _mm256_set1_epi8(15));
    __m128i table = _mm_loadu_si128((const __m128i *)multiples[multiplier]);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), x);
}
#else
typedef __m128i Codes;
typedef __m128i PackedCodes; /* the upper half is ignored */
INLINE Codes load_codes(const char *from) { return _mm_loadu_si128((const __m128i *)from); }
INLINE PackedCodes load_packed_codes(const char *from) { return _mm_loadl_epi64((const __m128i *)from); }
INLINE Codes codes_of_group(PackedCodes packed, uint8_t multiplier) {
    __m128i x = _mm_cvtepu8_epi16(packed);
    x = _mm_and_si128(_mm_or_si128(x, _mm_slli_epi16(x, 4)), _mm_set1_epi8(15));
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)multiples[multiplier]), x);
}
#endif

/* Returns the index of the multiplier of element i of a row in four bits, in tables of 32 rows. */
INLINE uint8_t multiplier_of(const char *row, long d, long i) { return row[multipliers_at(d) + i / GROUP] & 31; }

/* Shifting the bits of an e4m3 number makes them an fp16 number, which is too small by this factor. The conversion from
 * fp16 does not flush denormals. */
#define FP8_FACTOR 256.0f

/* Converts 2 * SIMD_WIDTH codes of eight bits to fp32. The result for KV_FP8 is the code's value divided by FP8_FACTOR. */
INLINE void widen_codes(Codes x, vf out[2], const int kv_format) {
#if SIMD_WIDTH == 16
    if (kv_format != KV_FP8) {
        out[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
        out[1] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
    } else {
        __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(x), 7);
        __m512i half = _mm512_and_si512(shifted, _mm512_set1_epi16(0xbf80 - 65536));
        out[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
        out[1] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    }
#else
    if (kv_format != KV_FP8) {
        out[0] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
        out[1] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
    } else {
        __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);
        __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbf80 - 65536));
        out[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
        out[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
#endif
}
