/* Converts bf16 inputs to 16-bit integers, for products with codes that stand for small integers.
 *
 * The inputs of a block share a scale, a power of two. A number keeps all of its 8 bits unless it is more than 2^7
 * times smaller than the largest number of its block. A smaller number loses less than the largest number lost when it
 * was rounded to bf16.
 *
 * A block consists of parts. The codes of a part share a scale: a part is a group, or a piece of a group that is longer
 * than a block. The sum of a part's products is a 32-bit integer, so it is exact in any order. */
#pragma once
#include "strips.h"

#define MAX_INTEGER_BLOCK 128 /* the most inputs of a block: 128 * 255 * 2^15 fits in 32 bits, even if an offset is
                                 added */
#define MAX_PARTS (MAX_INTEGER_BLOCK / CODE_BLOCK)

#if SIMD_WIDTH == 16
#define FEW_INTEGER_ROWS 4 /* for more rows, it is faster to unpack codes, which are then loaded once for all rows */
#else
#define FEW_INTEGER_ROWS 2
#endif
#if SIMD_WIDTH == 16 && defined(__AVX512VNNI__) && !defined(HAS_TILES)
#define FEW_BYTE_ROWS 12 /* the most rows that are multiplied byte by byte */
#else
#define FEW_BYTE_ROWS FEW_INTEGER_ROWS
#endif

/* Rows as integers. Blocks and parts are numbered over all of K. */
typedef struct {
    int32_t *pairs;  /* each strip of rows as [K / 2][its rows]: pairs of inputs i and i + 4 of an octet, i = 0 to 3.
                        For a few rows and codes of at least 0, the bytes of an octet instead: the upper bytes of its
                        even inputs, then of its odd inputs, then the lower bytes in the same order */
    int32_t *starts; /* [parts][rows]: the number at which the sum of a part's products starts, if codes have an
                        offset */
    float *scales;   /* [blocks][rows]: the value of integer 1; NaN if the block contains an infinity or a NaN */
    uint8_t *table;  /* [16]: the integers that the weight's 4-bit codes stand for, shifted to be at least 0 */
} IntegerRows;

/* A block of inputs of a weight. */
typedef struct {
    long from, count;         /* the inputs of the block: [from, from + count) */
    long group, parts, inputs; /* group: index of the first part's group; inputs: how many inputs a part has (the last
                                  may have fewer) */
    long part;                /* the number of the block's first part */
} IntegerBlock;

/* Returns whether this product multiplies integers. */
INLINE int multiplies_integers(const Gemm *g) {
    return g->x_bf16 && g->weight->kind >= INTEGER4 && g->weight->kind <= INTEGER8;
}

/* Returns by how many bits the converted inputs are shorter than 16 bits. With 8-bit codes in AMX tiles they must be
 * shorter, because fp32 sums are exact only below 2^24. */
INLINE int dropped_bits(const Weight *w) {
#ifdef HAS_TILES
    if (w->kind == INTEGER8) return w->group == CODE_BLOCK ? 2 : 3;
#endif
    (void)w;
    return 0;
}

/* Returns K, padded to whole blocks of codes. */
INLINE long integer_depth(const Weight *w) { return ceil_div(w->k, CODE_BLOCK) * CODE_BLOCK; }

/* Returns the block that begins at input `from`; at the end of K, the block is empty. part: the number of the block's
 * first part. */
INLINE IntegerBlock block_at(const Weight *w, long from, long part) {
    IntegerBlock b = {.from = from, .group = from / w->group, .part = part};
    long most = MAX_INTEGER_BLOCK / w->group * w->group, group_left = (b.group + 1) * w->group - from;
    b.count = min_long(most ? most : min_long(MAX_INTEGER_BLOCK, group_left), integer_depth(w) - from);
    b.inputs = min_long(most ? most : b.count, w->group);
    b.parts = b.count ? ceil_div(b.count, b.inputs) : 0;
    return b;
}

/* Returns the block after b. */
INLINE IntegerBlock block_after(const Weight *w, IntegerBlock b) {
    return block_at(w, b.from + b.count, b.part + b.parts);
}

/* Returns how many groups end in a block, counted from group b.group on. */
INLINE long groups_ending(const Weight *w, IntegerBlock b) {
    return b.from + b.count == min_long((b.group + b.parts) * w->group, integer_depth(w)) ? b.parts : b.parts - 1;
}

/* Returns the number of parts in all of K. This is also the most blocks that there can be, because a block has at least
 * one part. */
INLINE long count_parts(const Weight *w) {
    long parts = 0;
    for (IntegerBlock b = block_at(w, 0, 0); b.from < w->k; b = block_after(w, b)) parts = b.part + b.parts;
    return parts;
}

static size_t integer_rows_bytes(const Gemm *g, long rows) {
    return 16 + rows * (integer_depth(g->weight) * sizeof(int16_t) + count_parts(g->weight) * 2 * sizeof(int32_t));
}

INLINE IntegerRows integer_rows(const Gemm *g, char *buffer, long rows) {
    IntegerRows x = {.table = (uint8_t *)buffer, .pairs = (int32_t *)(buffer + 16)};
    x.starts = x.pairs + rows * integer_depth(g->weight) / 2;
    x.scales = (float *)(x.starts + rows * count_parts(g->weight));
    return x;
}

/* Writes the integers that 4-bit codes stand for, all raised so that the lowest is not below 0. Returns by how much the
 * codes of a weight are raised. */
INLINE int32_t fill_table(const Weight *w, float unit, uint8_t *table) {
    float lowest = 0;
    if (w->kind == INTEGER6) return RAISED_SIX_BITS;
    if (w->kind != INTEGER4) return 0;
    for (int i = 0; i < 16; i++) lowest = w->values[i] < lowest ? w->values[i] : lowest;
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)((w->values[i] - lowest) / unit);
    return (int32_t)(-lowest / unit);
}

/* Returns whether the integer of every 4-bit code in the table is the code itself. */
INLINE int is_identity(const uint8_t *table) {
    int differs = 0;
    for (int i = 0; i < 16; i++) differs |= table[i] != i;
    return !differs;
}

/* Returns whether integers are multiplied byte by byte (integer_bytes.h). */
INLINE int multiplies_bytes(const Gemm *g, const uint8_t *table) {
    if (g->t > FEW_BYTE_ROWS) return 0;
    return g->weight->kind == INTEGER6 || (g->weight->kind == INTEGER4 && is_identity(table));
}

/* Returns the bits of the largest magnitude among `length` numbers, where `length` is a multiple of 16. */
INLINE bf16 largest_magnitude(const bf16 *x, long length) {
    __m256i largest = _mm256_setzero_si256();
    for (long k = 0; k < length; k += 16) {
        __m256i numbers = _mm256_loadu_si256((const __m256i *)(x + k));
        largest = _mm256_max_epu16(largest, _mm256_and_si256(numbers, _mm256_set1_epi16(0x7fff)));
    }
    __m128i half = _mm_max_epu16(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    return ~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1))), 0);
}

/* Returns an octet of bf16 numbers times `factor`, rounded to the nearest integers. */
INLINE __m256i octet_of_integers(const bf16 *x, __m256 factor) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)), factor));
}

INLINE float power_of_two(int biased_exponent) {
    uint32_t bits = (uint32_t)biased_exponent << 23;
    float power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return power;
}

/* Returns the value of integer 1 in a block of `length` inputs. Sets *factor to the factor that converts inputs to
 * integers. dropped: by how many bits the integers are shorter than 16 bits. */
INLINE float block_scale(const bf16 *x, long length, int dropped, float *factor) {
    bf16 largest = largest_magnitude(x, length);
    int exponent = max_long(largest >> 7, 15), finite = largest < 0x7f80;
    *factor = finite ? power_of_two(268 - dropped - exponent) : 0;
    return finite ? power_of_two(exponent - 14 + dropped) : __builtin_nanf("");
}

/* paired returns the pairs of an octet of integers, and split_in_bytes returns its bytes (see IntegerRows). */
INLINE __m128i paired(__m256i integers) {
    __m128i upper = _mm_slli_epi32(_mm256_extracti128_si256(integers, 1), 16);
    return _mm_blend_epi16(_mm256_castsi256_si128(integers), upper, 0xaa);
}

INLINE __m128i split_in_bytes(__m256i integers) {
    __m128i octet = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
    return _mm_shuffle_epi8(octet, _mm_setr_epi8(1, 5, 9, 13, 3, 7, 11, 15, 0, 4, 8, 12, 2, 6, 10, 14));
}

/* Converts `length` inputs of a row, a multiple of 16. Returns the sum of the integers. pairs: the address for the
 * first pair; the following pairs are `rows` words apart. */
INLINE int32_t convert_part(const bf16 *x, long length, float factor, long rows, int32_t *pairs, int as_bytes) {
    __m256i sums = _mm256_setzero_si256();
    for (long k = 0; k < length; k += 8, pairs += 4 * rows) {
        __m256i integers = octet_of_integers(x + k, _mm256_set1_ps(factor));
        sums = _mm256_add_epi32(sums, integers);
        __m128i words = as_bytes ? split_in_bytes(integers) : paired(integers);
        pairs[0] = _mm_extract_epi32(words, 0), pairs[rows] = _mm_extract_epi32(words, 1);
        pairs[2 * rows] = _mm_extract_epi32(words, 2), pairs[3 * rows] = _mm_extract_epi32(words, 3);
    }
    int32_t of_lanes[8], sum = 0;
    _mm256_storeu_si256((__m256i *)of_lanes, sums);
    for (int i = 0; i < 8; i++) sum += of_lanes[i];
    return sum;
}

/* Converts a block of rows x [rows, K] to integers. */
static void convert_rows(const Gemm *g, const bf16 *x, const Strips *s, long rows, IntegerRows to) {
    const Weight *w = g->weight;
    float unit = integer_unit(w), factor;
    int32_t offset = fill_table(w, unit, to.table);
    int as_bytes = multiplies_bytes(g, to.table);
    for (long i = 0; i < s->count; i++)
        for (long r = 0; r < s->strip[i].rows; r++, x += w->k) {
            long row = s->strip[i].row + r, strip_rows = s->strip[i].rows, number = 0;
            int32_t *pairs = to.pairs + s->strip[i].row * integer_depth(w) / 2 + r;
            for (IntegerBlock b = block_at(w, 0, 0); b.from < w->k; b = block_after(w, b), number++) {
                bf16 inputs[MAX_INTEGER_BLOCK] = {0};
                memcpy(inputs, x + b.from, min_long(b.count, w->k - b.from) * sizeof(bf16));
                to.scales[number * rows + row] = block_scale(inputs, b.count, dropped_bits(w), &factor) * unit;
                for (long p = 0, k = 0; p < b.parts; p++, k += b.inputs) {
                    int32_t sum = convert_part(inputs + k, min_long(b.inputs, b.count - k), factor, strip_rows,
                                               pairs + (b.from + k) / 2 * strip_rows, as_bytes);
                    to.starts[(b.part + p) * rows + row] = -offset * sum;
                }
            }
        }
}
