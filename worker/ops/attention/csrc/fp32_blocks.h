/* Loads keys and values for the fp32 kernel: in place, or packed into scratch memory if several strips of rows read
 * them.
 *
 * Elements are loaded into pairs of registers. The two registers usually hold consecutive elements. But bf16 is
 * converted without a shuffle, so the first register holds the even elements and the second the odd elements. The rows
 * of q and of the output are kept in the same order, so every dot product pairs the right elements. */
#pragma once
#include "key_addresses.h"

/* Formats of elements in memory. PACKED: fp32, packed by pack_keys or pack_values. INT8, FP8, INT4: codes
 * (kv_format.h). */
enum { PACKED, F32, BF16, INT8, FP8, INT4 };

#define STEP (2 * SIMD_WIDTH) /* elements of a pair of registers together */
#define CHUNK 8               /* a pair of registers holds this many elements of each of SIMD_WIDTH / 4 keys */

INLINE int is_codes(const int format) { return format >= INT8; }

/* Returns the bytes of n elements. */
INLINE long bytes_of(long n, const int format) {
    return format == INT4 ? (n + 1) / 2 : is_codes(format) ? n : format == BF16 ? 2 * n : 4 * n;
}

INLINE vu load_bits(const char *from) {
    vu x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
}

INLINE void widen_pairs(vu x, vf out[2]) { out[0] = as_float(x << 16), out[1] = as_float(x & 0xffff0000u); }

/* Loads STEP consecutive elements. multiplier: that of codes in four bits */
INLINE void load_step(const char *from, uint8_t multiplier, vf out[2], const int format) {
    if (format == INT4)
        widen_codes(codes_of_group(load_packed_codes(from), multiplier), out, KV_INT8);
    else if (is_codes(format))
        widen_codes(load_codes(from), out, format == INT8 ? KV_INT8 : KV_FP8);
    else if (format == BF16)
        widen_pairs(load_bits(from), out);
    else
        out[0] = as_float(load_bits(from)), out[1] = as_float(load_bits(from + SIMD_WIDTH * 4));
}

INLINE __m128i load_16_bytes(const char *from) { return _mm_loadu_si128((const __m128i *)from); }

/* Loads 16 bytes from each of SIMD_WIDTH / 4 addresses that are `stride` apart. */
INLINE vu gather_16_bytes(const char *from, long stride) {
#if SIMD_WIDTH == 16
    __m512i x = _mm512_castsi128_si512(load_16_bytes(from));
    x = _mm512_inserti32x4(x, load_16_bytes(from + stride), 1);
    x = _mm512_inserti32x4(x, load_16_bytes(from + 2 * stride), 2);
    return (vu)_mm512_inserti32x4(x, load_16_bytes(from + 3 * stride), 3);
#else
    return (vu)_mm256_inserti128_si256(_mm256_castsi128_si256(load_16_bytes(from)), load_16_bytes(from + stride), 1);
#endif
}

INLINE __m128i load_8_bytes(const char *from) { return _mm_loadl_epi64((const __m128i *)from); }

/* Loads 8 codes from each of SIMD_WIDTH / 4 addresses. The result has the first 4 codes of every address, and then the
 * last 4 codes of every address. */
INLINE Codes gather_codes(const char *from, long stride) {
    __m128i x = _mm_unpacklo_epi32(load_8_bytes(from), load_8_bytes(from + stride));
#if SIMD_WIDTH == 16
    __m128i y = _mm_unpacklo_epi32(load_8_bytes(from + 2 * stride), load_8_bytes(from + 3 * stride));
    return _mm256_set_m128i(_mm_unpackhi_epi64(x, y), _mm_unpacklo_epi64(x, y));
#else
    return x;
#endif
}

/* Loads CHUNK elements of each of SIMD_WIDTH / 4 keys. Keys are never in four bits. */
INLINE void load_keys(const char *from, long stride, vf out[2], const int format) {
    if (is_codes(format))
        widen_codes(gather_codes(from, stride), out, format == INT8 ? KV_INT8 : KV_FP8);
    else if (format == BF16)
        widen_pairs(gather_16_bytes(from, stride), out);
    else
        out[0] = as_float(gather_16_bytes(from, stride)), out[1] = as_float(gather_16_bytes(from + 16, stride));
}

INLINE long chunks_of(const AttentionArgs *a) { return (a->d + CHUNK - 1) / CHUNK; }

/* Packs a head's keys to [BLOCK_KEYS / SIMD_WIDTH][chunks][2][4][SIMD_WIDTH], which score_packed reads sequentially. */
INLINE void pack_keys(const AttentionArgs *a, const KeyAddresses *p, ptrdiff_t offset, float *to,
                      Prefetch *prefetch, const int format) {
    const long size = bytes_of(1, format), chunks = chunks_of(a);
    _Alignas(64) char line[SIMD_WIDTH * CHUNK * 4] = {0};
    for (long i = p->from / SIMD_WIDTH * SIMD_WIDTH; i < p->to; i += SIMD_WIDTH)
        for (long c = 0; c < chunks; c++) {
            float *out = to + (i * chunks + c * SIMD_WIDTH) * CHUNK;
            long left = a->d - c * CHUNK;
            for (int j = 0; j < SIMD_WIDTH; j++) {
                const char *key = p->keys[i + j] + offset + c * CHUNK * size;
                if (left >= CHUNK)
                    memcpy(line + j * CHUNK * size, key, CHUNK * size);
                else
                    memset(line + j * CHUNK * size, 0, CHUNK * size), memcpy(line + j * CHUNK * size, key, left * size);
            }
            for (int g = 0; g < 4; g++) {
                vf x[2];
                load_keys(line + g * CHUNK * size, 4 * CHUNK * size, x, format);
                for (int half = 0; half < 2; half++) store_f32(out + (half * 4 + g) * SIMD_WIDTH, x[half]);
            }
            prefetch_lines(prefetch, SIMD_WIDTH * CHUNK * size / 64);
        }
}

/* Packs a head's values to [out_stride / STEP][BLOCK_KEYS][STEP]. */
INLINE void pack_values(const AttentionArgs *a, const KeyAddresses *p, ptrdiff_t offset, float *to,
                        Prefetch *prefetch, const int format) {
    for (long i = p->from; i < p->to; i++) {
        const char *value = p->values[i] + offset;
        for (long d = 0; d < a->d; d += STEP) {
            vf x[2];
            uint8_t multiplier = format == INT4 ? multiplier_of(value, a->d, d) : 0;
            const char *from = value + bytes_of(d, format);
            char tail[STEP * 4] = {0};
            if (d + STEP > a->d) from = memcpy(tail, from, bytes_of(a->d - d, format));
            load_step(from, multiplier, x, format);
            for (int half = 0; half < 2; half++)
                store_f32(to + d * BLOCK_KEYS + i * STEP + half * SIMD_WIDTH, x[half]);
        }
        prefetch_lines(prefetch, (bytes_of(a->d, format) + 63) / 64);
    }
}

/* Copies a row of q to fp32, padded with zeros to whole chunks, in the order in which load_keys loads keys. */
INLINE void arrange_q(const char *q, float *to, long d, int is_bf16, int alternating) {
    for (long i = 0; i < d; i += CHUNK) {
        char tail[CHUNK * 4] = {0};
        const char *from = q + i * (is_bf16 ? 2 : 4);
        if (d - i < CHUNK) from = memcpy(tail, from, (d - i) * (is_bf16 ? 2 : 4));
        __m128 a, b;
        if (is_bf16) {
            __m128i x = load_16_bytes(from);
            a = (__m128)_mm_unpacklo_epi16(_mm_setzero_si128(), x);
            b = (__m128)_mm_unpackhi_epi16(_mm_setzero_si128(), x);
        } else
            a = (__m128)load_16_bytes(from), b = (__m128)load_16_bytes(from + 16);
        _mm_storeu_ps(to + i, alternating ? _mm_shuffle_ps(a, b, 0x88) : a);
        _mm_storeu_ps(to + i + 4, alternating ? _mm_shuffle_ps(a, b, 0xdd) : b);
    }
}
