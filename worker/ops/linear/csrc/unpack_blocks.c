/* Unpacks GGUF's block formats to codes, scales and minimums, as worker/quantization/gguf.py defines them.
 *
 * A row consists of blocks. Each code becomes one byte. 4-bit codes that stand for integers are in two's complement.
 * Compiled without fused multiply-add, so that scales and minimums have the same bits as PyTorch computes.
 *
 * A function that unpacks a block unpacks only its scales and minimums if `codes` is NULL. */
#include "unpack_blocks.h"
#include "intrinsics.h"
#include <string.h>

USES_AVX2 static inline float half_at(const uint8_t *bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

/* Adds bit 4 to 32 codes: bit i of `high` belongs to code i. */
USES_AVX2 static inline void add_fifth_bits(const uint8_t *bytes, uint8_t *codes) {
    uint32_t high;
    memcpy(&high, bytes, 4);
    for (int i = 0; i < 32; i++) codes[i] |= (high >> i & 1) << 4;
}

/* Unpacks 4-bit codes from `count` bytes. For each run of `width` bytes, the codes in the low halves of the bytes come
 * first, then the codes in the high halves. flip: bits to invert in each code. */
USES_AVX2 static inline void nibbles(const uint8_t *bytes, int count, int width, int flip, uint8_t *codes) {
    if (!codes) return;
    for (int run = 0; run < count; run += width, bytes += width, codes += 2 * width)
        for (int i = 0; i < width; i++) {
            codes[i] = (bytes[i] & 15) ^ flip;
            codes[width + i] = bytes[i] >> 4 ^ flip;
        }
}

USES_AVX2 static void q8_0(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    *scale = half_at(block);
    if (codes) memcpy(codes, block + 2, 32);
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
    *scale = half_at(block);
    if (!codes) return;
    nibbles(block + 6, 16, 16, 0, codes);
    add_fifth_bits(block + 2, codes);
    for (int i = 0; i < 32; i++) codes[i] -= 16;
}

USES_AVX2 static void q5_1(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    *scale = half_at(block);
    *minimum = half_at(block + 2);
    if (!codes) return;
    nibbles(block + 8, 16, 16, 0, codes);
    add_fifth_bits(block + 4, codes);
}

/* Unpacks fields of two bits from `count` bytes. Of each run of 32 bytes, the lowest fields come first, then the next
 * ones, and so on. */
USES_AVX2 static inline void two_bits(const uint8_t *bytes, int count, uint8_t *codes) {
    for (int run = 0; run < count; run += 32)
        for (int field = 0; field < 4; field++)
            for (int i = 0; i < 32; i++) codes[4 * run + 32 * field + i] = bytes[run + i] >> 2 * field & 3;
}

USES_AVX2 static void q2_k(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    float factor = half_at(block + 80), below = -half_at(block + 82);
    for (int i = 0; i < 16; i++) {
        scale[i] = factor * (block[i] & 15);
        minimum[i] = below * (block[i] >> 4);
    }
    if (codes) two_bits(block + 16, 64, codes);
}

/* A scale has its low four bits in bytes 96 to 103, and its high two bits in bytes 104 to 107. */
USES_AVX2 static void q3_k(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    float factor = half_at(block + 108);
    for (int i = 0; i < 16; i++) {
        int low = block[96 + i % 8] >> 4 * (i / 8) & 15, high = block[104 + i % 4] >> 2 * (i / 4) & 3;
        scale[i] = factor * ((low | high << 4) - 32);
    }
    if (!codes) return;
    two_bits(block + 32, 64, codes);
    for (int bit = 0; bit < 8; bit++)
        for (int i = 0; i < 32; i++)
            codes[32 * bit + i] = ((codes[32 * bit + i] | (block[i] >> bit & 1) << 2) - 4) & 15;
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
    if (!codes) return;
    nibbles(block + 48, 128, 32, 0, codes);
    for (int bit = 0; bit < 8; bit++)
        for (int i = 0; i < 32; i++) codes[32 * bit + i] |= (block[16 + i] >> bit & 1) << 4;
}

USES_AVX2 static void q6_k(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    float factor = half_at(block + 208);
    for (int i = 0; i < 16; i++) scale[i] = factor * (int8_t)block[192 + i];
    if (!codes) return;
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

USES_AVX2 static void iq4_nl(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    *scale = half_at(block);
    nibbles(block + 2, 16, 16, 0, codes);
}

/* A scale has its low four bits in bytes 4 to 7, and its high two bits in bytes 2 and 3. */
USES_AVX2 static void iq4_xs(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    float factor = half_at(block);
    for (int i = 0; i < 8; i++) {
        int low = block[4 + i / 2] >> 4 * (i % 2) & 15, high = block[2 + i / 4] >> 2 * (i % 4) & 3;
        scale[i] = factor * ((low | high << 4) - 32);
    }
    nibbles(block + 8, 128, 16, 0, codes);
}

/* A scale is E4M3 without a sign. 0x7F, which is NaN in E4M3, is 0. */
USES_AVX2 static void nvfp4(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    for (int i = 0; i < 4; i++) {
        int exponent = block[i] >> 3 & 15, mantissa = block[i] & 7;
        float number = exponent ? (8 + mantissa) * 0x1p-10f * (float)(1 << exponent) : mantissa * 0x1p-9f;
        scale[i] = block[i] == 0x7F ? 0 : number;
    }
    nibbles(block + 4, 32, 8, 0, codes);
}

/* Stores the one scale of a block of ternary numbers, for four groups. */
USES_AVX2 static inline void ternary_scale(const uint8_t *bytes, float *scale) {
    for (int i = 0; i < 4; i++) scale[i] = half_at(bytes);
}

USES_AVX2 static void tq2_0(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    ternary_scale(block + 64, scale);
    if (!codes) return;
    two_bits(block, 64, codes);
    for (int i = 0; i < 256; i++) codes[i] = (codes[i] - 1) & 15;
}

/* Unpacks the first `digits` ternary digits of `count` bytes: the first digit of every byte, then the second one, and so
 * on. A byte is a fraction of 256: times 3, the digit is what is at or above 256. Returns the end of the codes. */
USES_AVX2 static inline uint8_t *ternary(const uint8_t *bytes, int count, int digits, uint8_t *codes) {
    for (int digit = 0, power = 1; digit < digits; digit++, power *= 3)
        for (int i = 0; i < count; i++) *codes++ = (((uint8_t)(bytes[i] * power) * 3 >> 8) - 1) & 15;
    return codes;
}

USES_AVX2 static void tq1_0(const uint8_t *block, uint8_t *codes, float *scale, float *minimum) {
    (void)minimum;
    ternary_scale(block + 52, scale);
    if (codes) ternary(block + 48, 4, 4, ternary(block + 32, 16, 5, ternary(block, 32, 5, codes)));
}

/* The formats with grids (worker/quantization/gguf.py). A grid is given: each byte of its entries is the index of
 * a number. SIGN is set in the codes of negative numbers. */
#define EACH_BYTE 0x0101010101010101ull
#define SIGN 8

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
        for (int i = 0; codes && i < 4; i++) put_eight(grid, run[i], even_sign_bytes(word >> 7 * i), codes + 32 * group + 8 * i);
    }
}

USES_AVX2 static void iq2_xs(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 16; group++) scale[group] = factor * (0.5f + nibble_at(block + 66, group)) * 0.25f;
    for (int i = 0; codes && i < 32; i++) {
        uint32_t word = short_at(block + 2 + 2 * i);
        put_eight(grid, word & 511, even_sign_bytes(word >> 9), codes + 8 * i);
    }
}

USES_AVX2 static void iq2_s(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 16; group++) scale[group] = factor * (0.5f + nibble_at(block + 74, group)) * 0.25f;
    for (int i = 0; codes && i < 32; i++) {
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
        for (int i = 0; codes && i < 4; i++)
            put_two_fours(grid, entries[2 * i], entries[2 * i + 1], even_sign_bytes(word >> 7 * i),
                          codes + 32 * group + 8 * i);
    }
}

USES_AVX2 static void iq3_s(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale) {
    float factor = half_at(block);
    for (int group = 0; group < 8; group++) scale[group] = factor * (1 + 2 * nibble_at(block + 106, group));
    for (int i = 0; codes && i < 32; i++) {
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
        for (int i = 0; codes && i < 4; i++)
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
    for (int i = 0; codes && i < 32; i++) {
        int high = nibble_at(block + 32, i);
        put_eight(grid, block[i] | (high & 7) << 8, (uint64_t)(high >> 3) * SIGN * EACH_BYTE, codes + 8 * i);
    }
}

/* in the order of IN_C in worker/ops/block_rows.py */
const BlockFormat BLOCK_FORMATS[] = {
    {q8_0, 0, 32, 34, 1, 0},      {q4_0, 0, 32, 18, 1, 0},      {q4_1, 0, 32, 20, 1, 1},
    {q5_0, 0, 32, 22, 1, 0},      {q5_1, 0, 32, 24, 1, 1},      {q2_k, 0, 256, 84, 16, 1},
    {q3_k, 0, 256, 110, 16, 0},   {q4_k, 0, 256, 144, 8, 1},    {q5_k, 0, 256, 176, 8, 1},
    {q6_k, 0, 256, 210, 16, 0},   {iq4_nl, 0, 32, 18, 1, 0},    {iq4_xs, 0, 256, 136, 8, 0},
    {mxfp4, 0, 32, 17, 1, 0},     {nvfp4, 0, 64, 36, 4, 0},     {0, iq3_s, 256, 110, 8, 0},
    {0, iq3_xxs, 256, 98, 8, 0},  {0, iq2_s, 256, 82, 16, 0},   {0, iq2_xs, 256, 74, 16, 0},
    {0, iq2_xxs, 256, 66, 8, 0},  {0, iq1_m, 256, 56, 16, 0},   {0, iq1_s, 256, 50, 8, 0},
    {tq2_0, 0, 256, 66, 4, 0},    {tq1_0, 0, 256, 54, 4, 0},
};

/* Unpacks n rows of `blocks` blocks each. format: an index into BLOCK_FORMATS; codes: [n, blocks * numbers]; scale and
 * minimum: [n, blocks * groups]. */
__attribute__((visibility("default"))) void unpack_blocks(int format, const uint8_t *grid, const uint8_t *rows, long n,
                                                          long blocks, uint8_t *codes, float *scale, float *minimum,
                                                          int threads) {
    const BlockFormat *f = &BLOCK_FORMATS[format];
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < n; row++) unpack_row(f, grid, rows + row * blocks * f->bytes, blocks, row * blocks, codes, scale, minimum);
}

/* Returns the largest absolute value of all scales and minimums of n rows, as the bits of a float: infinities and NaNs
 * are larger than all numbers. */
__attribute__((visibility("default"))) uint32_t largest_in_blocks(int format, const uint8_t *grid, const uint8_t *rows,
                                                                  long n, long blocks, int threads) {
    const BlockFormat *f = &BLOCK_FORMATS[format];
    uint32_t largest = 0;
#pragma omp parallel for num_threads(threads) reduction(max : largest)
    for (long block = 0; block < n * blocks; block++) {
        float found[2][MAX_BLOCK_GROUPS];
        unpack_block(f, grid, rows + block * f->bytes, 0, found[0], found[1]);
        for (int part = 0; part < 1 + f->has_minimum; part++)
            for (int i = 0; i < f->groups; i++) {
                uint32_t bits;
                memcpy(&bits, &found[part][i], 4);
                bits &= 0x7fffffff;
                largest = bits > largest ? bits : largest;
            }
    }
    return largest;
}
