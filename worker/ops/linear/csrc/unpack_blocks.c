/* Unpacks GGUF's block formats to codes, scales and minimums, as worker/quantization/gguf.py defines them.
 *
 * A row consists of blocks. Each code becomes one byte. 4-bit codes that stand for integers are in two's complement.
 * Compiled without fused multiply-add, so that scales and minimums have the same bits as PyTorch computes. */
#include "intrinsics.h"
#include <string.h>

/* Unpacks one block. minimum is NULL for formats without minimums. */
typedef void Unpack(const uint8_t *block, uint8_t *codes, float *scale, float *minimum);

USES_AVX2 static inline float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

/* Unpacks 4-bit codes from `count` bytes. For each run of `width` bytes, the codes in the low halves of the bytes come
 * first, then the codes in the high halves. flip: bits to invert in each code. */
USES_AVX2 static inline void nibbles(const uint8_t *bytes, int count, int width, int flip, uint8_t *codes) {
    for (int run = 0; run < count; run += width, bytes += width, codes += 2 * width)
        for (int i = 0; i < width; i++) {
            codes[i] = (bytes[i] & 15) ^ flip;
            codes[width + i] = bytes[i] >> 4 ^ flip;
        }
}

USES_AVX2 static void q8_0(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    *scale = half_at(block);
    memcpy(codes, block + 2, 32);
}

USES_AVX2 static void q4_0(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    *scale = half_at(block);
    nibbles(block + 2, 16, 16, 8, codes);
}

USES_AVX2 static void q4_1(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    *scale = half_at(block);
    *minimum = half_at(block + 2) + 8 * *scale;
    nibbles(block + 4, 16, 16, 8, codes);
}

USES_AVX2 static void q5_0(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    uint32_t high;
    memcpy(&high, block + 2, 4);
    *scale = half_at(block);
    nibbles(block + 6, 16, 16, 0, codes);
    for (int i = 0; i < 32; i++) codes[i] = (codes[i] | (high >> i & 1) << 4) - 16;
}

/* Q4_K and Q5_K have eight scales and eight minimums of six bits each, in 12 bytes. The first four scales are the low
 * six bits of bytes 0 to 3, and the first four minimums are the low six bits of bytes 4 to 7. The two high bits of
 * bytes 0 to 7 are the high bits of the other scales and minimums. Of bytes 8 to 11, the low halves are the low four
 * bits of these scales, and the high halves are the low four bits of these minimums. */
USES_AVX2 static inline void k_scales(const uint8_t *block, float *scale, float *minimum) {
    const uint8_t *bytes = block + 4;
    float factor = half_at(block), below = -half_at(block + 2);
    for (int i = 0; i < 4; i++) {
        scale[i] = factor * (bytes[i] & 63);
        minimum[i] = below * (bytes[4 + i] & 63);
        scale[4 + i] = factor * ((bytes[8 + i] & 15) | (bytes[i] >> 2 & 48));
        minimum[4 + i] = below * (bytes[8 + i] >> 4 | (bytes[4 + i] >> 2 & 48));
    }
}

USES_AVX2 static void q4_k(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    k_scales(block, scale, minimum);
    for (int i = 0; i < 8; i++) minimum[i] += 8 * scale[i];
    nibbles(block + 16, 128, 32, 8, codes);
}

USES_AVX2 static void q5_k(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    k_scales(block, scale, minimum);
    nibbles(block + 48, 128, 32, 0, codes);
    for (int bit = 0; bit < 8; bit++)
        for (int i = 0; i < 32; i++) codes[32 * bit + i] |= (block[16 + i] >> bit & 1) << 4;
}

USES_AVX2 static void q6_k(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    float factor = half_at(block + 208);
    for (int i = 0; i < 16; i++) scale[i] = factor * (int8_t)block[192 + i];
    nibbles(block, 128, 64, 0, codes);
    for (int half = 0; half < 2; half++)
        for (int part = 0; part < 4; part++) {
            uint8_t *to = codes + 128 * half + 32 * part;
            for (int i = 0; i < 32; i++) to[i] = (to[i] | (block[128 + 32 * half + i] >> 2 * part & 3) << 4) - 32;
        }
}

/* The scale is a power of two. The block stores its exponent with the bias of fp32. Exponent 0 means 2^-127, a denormal
 * number. */
USES_AVX2 static void mxfp4(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    uint32_t bits = *block ? (uint32_t)*block << 23 : 1u << 22;
    memcpy(scale, &bits, 4);
    nibbles(block + 1, 16, 16, 0, codes);
}

static const struct {
    Unpack *unpack;
    int numbers, bytes, groups, has_minimum; /* how many of these a block has; has_minimum: 1 if it has minimums */
} FORMATS[] = {
    {q8_0, 32, 34, 1, 0},   {q4_0, 32, 18, 1, 0},   {q4_1, 32, 20, 1, 1},    {q5_0, 32, 22, 1, 0},
    {q4_k, 256, 144, 8, 1}, {q5_k, 256, 176, 8, 1}, {q6_k, 256, 210, 16, 0}, {mxfp4, 32, 17, 1, 0},
};

/* Unpacks n rows of `blocks` blocks each. format: an index into FORMATS; codes: [n, blocks * numbers]; scale and
 * minimum: [n, blocks * groups]. */
__attribute__((visibility("default"))) void unpack_blocks(int format, const uint8_t *rows, long n, long blocks, uint8_t *codes,
                                                          float *scale, float *minimum, int threads) {
    long numbers = FORMATS[format].numbers, bytes = FORMATS[format].bytes, groups = FORMATS[format].groups;
    int has_minimum = FORMATS[format].has_minimum;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < n; row++)
        for (long b = row * blocks; b < (row + 1) * blocks; b++)
            FORMATS[format].unpack(rows + b * bytes, codes + b * numbers, scale + b * groups,
                                   has_minimum ? minimum + b * groups : 0);
}
