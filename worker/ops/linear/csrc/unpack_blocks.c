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

/* The formats with grids (worker/quantization/gguf_grids.py). A grid is given: each byte of its entries is the index of
 * a number. SIGN is set in the codes of negative numbers. */
#define EACH_BYTE 0x0101010101010101ull
#define SIGN 8

/* Unpacks one block. */
typedef void UnpackGrid(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale);

/* Returns eight bytes that are SIGN where a bit of `signs` is set, the lowest bit first, else 0. */
static inline uint64_t sign_bytes(uint32_t signs) {
    uint64_t bits = (signs & 255) * EACH_BYTE & 0x8040201008040201ull; /* byte i keeps bit i */
    return (bits + 127 * EACH_BYTE) >> 4 & SIGN * EACH_BYTE;           /* moves the bit to bit 7 of its byte */
}

/* Returns the sign bytes of seven bits. The number of minus signs is even, which gives the eighth. */
static inline uint64_t even_sign_bytes(uint32_t seven) {
    seven &= 127;
    return sign_bytes(seven | (uint32_t)__builtin_parity(seven) << 7);
}

static inline void put_eight(const uint8_t *grid, long entry, uint64_t signs, uint8_t *codes) {
    uint64_t numbers;
    memcpy(&numbers, grid + 8 * entry, 8);
    numbers |= signs;
    memcpy(codes, &numbers, 8);
}

static inline void put_two_fours(const uint8_t *grid, long first, long second, uint64_t signs, uint8_t *codes) {
    uint32_t low, high;
    memcpy(&low, grid + 4 * first, 4);
    memcpy(&high, grid + 4 * second, 4);
    uint64_t numbers = (low | (uint64_t)high << 32) | signs;
    memcpy(codes, &numbers, 8);
}

static inline uint32_t word_at(const uint8_t *bytes) {
    uint32_t word;
    memcpy(&word, bytes, 4);
    return word;
}

static inline uint32_t short_at(const uint8_t *bytes) { return bytes[0] | (uint32_t)bytes[1] << 8; }

static inline int nibble_at(const uint8_t *bytes, int i) { return bytes[i / 2] >> 4 * (i & 1) & 15; }

USES_AVX2 static void iq2_xxs(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 8; group++) {
        const uint8_t *run = block + 2 + 8 * group;
        uint32_t word = word_at(run + 4);
        scale[group] = factor * (0.5f + (word >> 28)) * 0.25f;
        for (int i = 0; i < 4; i++) put_eight(grid, run[i], even_sign_bytes(word >> 7 * i), codes + 32 * group + 8 * i);
    }
}

USES_AVX2 static void iq2_xs(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 16; group++) scale[group] = factor * (0.5f + nibble_at(block + 66, group)) * 0.25f;
    for (int i = 0; i < 32; i++) {
        uint32_t word = short_at(block + 2 + 2 * i);
        put_eight(grid, word & 511, even_sign_bytes(word >> 9), codes + 8 * i);
    }
}

USES_AVX2 static void iq2_s(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 16; group++) scale[group] = factor * (0.5f + nibble_at(block + 74, group)) * 0.25f;
    for (int i = 0; i < 32; i++) {
        int high = block[66 + i / 4] >> 2 * (i % 4) & 3;
        put_eight(grid, block[2 + i] | high << 8, sign_bytes(block[34 + i]), codes + 8 * i);
    }
}

USES_AVX2 static void iq3_xxs(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 8; group++) {
        const uint8_t *entries = block + 2 + 8 * group;
        uint32_t word = word_at(block + 66 + 4 * group);
        scale[group] = factor * (0.5f + (word >> 28)) * 0.5f;
        for (int i = 0; i < 4; i++)
            put_two_fours(grid, entries[2 * i], entries[2 * i + 1], even_sign_bytes(word >> 7 * i),
                          codes + 32 * group + 8 * i);
    }
}

USES_AVX2 static void iq3_s(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 8; group++) scale[group] = factor * (1 + 2 * nibble_at(block + 106, group));
    for (int i = 0; i < 32; i++) {
        int high = block[66 + i / 4] >> 2 * (i % 4);
        put_two_fours(grid, block[2 + 2 * i] | (high & 1) << 8, block[3 + 2 * i] | (high & 2) << 7,
                      sign_bytes(block[74 + i]), codes + 8 * i);
    }
}

USES_AVX2 static void iq1_s(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 8; group++) {
        uint32_t word = short_at(block + 34 + 2 * group);
        uint64_t subtracted = (word >> 15) * SIGN * EACH_BYTE;
        scale[group] = factor * (int)(2 * (word >> 12 & 7) + 1) * 0.125f;
        for (int i = 0; i < 4; i++)
            put_eight(grid, block[2 + 4 * group + i] | (word >> 3 * i & 7) << 8, subtracted, codes + 32 * group + 8 * i);
    }
}

/* The float16 scale is in the top four bits of four words. */
USES_AVX2 static void iq1_m(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    const uint8_t *words = block + 48;
    uint8_t half[2] = {words[1] >> 4 | (words[3] & 0xf0), words[5] >> 4 | (words[7] & 0xf0)};
    float factor = half_at(half);
    for (int group = 0; group < 16; group++)
        scale[group] = factor * (int)(2 * (short_at(words + group / 4 * 2) >> 3 * (group % 4) & 7) + 1) * 0.125f;
    for (int i = 0; i < 32; i++) {
        int high = nibble_at(block + 32, i);
        put_eight(grid, block[i] | (high & 7) << 8, (uint64_t)(high >> 3) * SIGN * EACH_BYTE, codes + 8 * i);
    }
}

static const struct {
    UnpackGrid *unpack;
    int bytes, groups; /* of a block, which has 256 numbers */
} GRID_FORMATS[] = {
    {iq1_s, 50, 8},  {iq1_m, 56, 16},  {iq2_xxs, 66, 8}, {iq2_xs, 74, 16},
    {iq2_s, 82, 16}, {iq3_xxs, 98, 8}, {iq3_s, 110, 8},
};

/* Unpacks n rows of `blocks` blocks each. format: an index into GRID_FORMATS; grid: its entries; codes: [n, blocks *
 * 256]; scale: [n, blocks * groups]. */
__attribute__((visibility("default"))) void unpack_grids(int format, const uint8_t *grid, const uint8_t *rows, long n, long blocks,
                                                         uint8_t *codes, float *scale, int threads) {
    long bytes = GRID_FORMATS[format].bytes, groups = GRID_FORMATS[format].groups;
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < n; row++)
        for (long b = row * blocks; b < (row + 1) * blocks; b++)
            GRID_FORMATS[format].unpack(rows + b * bytes, grid, codes + b * 256, scale + b * groups);
}
