/* Rounds inputs to 8 bits, for products with weights of the INT8_INPUTS kinds (--activations int8).
 *
 * A block of 32 inputs shares a scale: its largest magnitude becomes 127, and all others the nearest integer, ties to
 * even. Blocks are counted from the first input of the packed weight. So the integers of a row depend on this row only,
 * and they are the same for every weight and every instruction set.
 *
 * Codes of a block may have several scales. A piece is 32 inputs that share one, or 16 if groups of the weight end
 * within a block. The sum of a piece's products is a 32-bit integer, so it is exact in any order. */
#pragma once
#include "dot_bytes.h"
#include "strips.h"

#define INT8_BLOCK 32 /* inputs that share a scale */
#define SMALLEST_INT8_BITS ((127 - 64) << 23) /* the bits of 2^-64: a block of smaller inputs becomes zeros */

/* Products of unsigned with signed bytes need codes that are raised to be at least 0. */
#if defined(HAS_DOT_BYTES) && defined(__x86_64__)
#define RAISES_CODES 1
#else
#define RAISES_CODES 0
#endif

/* How the codes of a weight become bytes that are multiplied. */
typedef struct {
    _Alignas(16) uint8_t table[16]; /* the bytes that 4-bit codes become */
    int32_t offset;                 /* by how much the bytes of codes are raised */
    int kind;                       /* NIBBLES, TABLE_BYTES, SIX_BITS or WHOLE_BYTES */
    float unit;                     /* the value of 1 */
} CodeBytes;

/* 4-bit codes that are their own bytes, other 4-bit codes, 6-bit codes, 8-bit codes */
enum { NIBBLES, TABLE_BYTES, SIX_BITS, WHOLE_BYTES };

/* The integers of a strip of rows. All arrays are [...][rows of the strip]. */
typedef struct {
    int32_t *words; /* [K / 4]: four bytes each. For codes of 4 or 6 bits, the even and then the odd inputs of each octet;
                       for 8-bit codes, four neighbouring inputs */
    int32_t *starts; /* [pieces]: the number at which the sum of a piece's products starts, which takes back `offset` */
    float *scales;   /* [blocks]: the value of 1, times the weight's factor; NaN if an input of the block is not finite */
    float *sums;     /* [groups]: the sum of a group's inputs, times the weight's factor, if the weight has minimums */
} Int8Rows;

INLINE int has_int8_inputs(const Weight *w) { return w->kind >= INT8_INPUTS4; }

INLINE long int8_blocks(const Weight *w) { return ceil_div(w->k, INT8_BLOCK); }
INLINE long piece_inputs(const Weight *w) { return w->group % INT8_BLOCK ? CODE_BLOCK : INT8_BLOCK; }
INLINE long int8_pieces(const Weight *w) { return ceil_div(w->k, piece_inputs(w)); }

INLINE long int8_row_words(const Weight *w) {
    return int8_blocks(w) * (INT8_BLOCK / 4 + 1) + int8_pieces(w) + (w->has_minimum ? group_count(w) : 0);
}

/* The buffer of a block of rows: CodeBytes, which all panels use, then the strips. */
static size_t int8_rows_bytes(const Gemm *g, long rows) {
    return sizeof(CodeBytes) + rows * int8_row_words(g->weight) * sizeof(int32_t);
}

INLINE CodeBytes *int8_codes(char *buffer) { return (CodeBytes *)buffer; }

/* Returns the arrays of the strip of `rows` rows that begins at `row`. buffer: int8_rows_bytes */
INLINE Int8Rows int8_strip(const Weight *w, char *buffer, long row, long rows) {
    Int8Rows x = {.words = (int32_t *)(buffer + sizeof(CodeBytes)) + row * int8_row_words(w)};
    x.starts = x.words + int8_blocks(w) * (INT8_BLOCK / 4) * rows;
    x.scales = (float *)(x.starts + int8_pieces(w) * rows);
    x.sums = x.scales + int8_blocks(w) * rows;
    return x;
}

/* Returns how the codes of a weight become bytes. */
static CodeBytes code_bytes(const Weight *w) {
    CodeBytes to = {.offset = RAISES_CODES ? 128 : 0, .kind = WHOLE_BYTES, .unit = 1};
    if (w->kind == INT8_INPUTS8) return to;
    if (w->kind == INT8_INPUTS6) {
        to.kind = SIX_BITS, to.offset = RAISED_SIX_BITS;
        return to;
    }
    float lowest = 0;
    int halves = 0, differs = 0;
    for (int i = 0; i < 16; i++) {
        lowest = w->values[i] < lowest ? w->values[i] : lowest;
        halves |= w->values[i] != (float)(int)w->values[i];
    }
    to.unit = halves ? 0.5f : 1.0f;
    for (int i = 0; i < 16; i++) differs |= (w->values[i] - lowest) / to.unit != i;
    to.kind = differs ? TABLE_BYTES : NIBBLES;
    float raised = differs && !RAISES_CODES ? 0 : lowest;
    to.offset = (int32_t)(-raised / to.unit);
    for (int i = 0; i < 16; i++) to.table[i] = (uint8_t)(int)((w->values[i] - raised) / to.unit);
    return to;
}

/* Returns eight inputs. */
INLINE __m256 eight_inputs(const char *x, int x_bf16) {
    if (!x_bf16) return _mm256_loadu_ps((const float *)x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16));
}

/* Loads a block of a row x [K], from input k on: inputs [4], with zeros beyond K. They stay in registers. */
INLINE void load_block(const Gemm *g, const char *x, long k, __m256 *inputs) {
    const long size = g->x_bf16 ? 2 : 4;
    char end[INT8_BLOCK * 4];
    const char *from = x + k * size;
    if (k + INT8_BLOCK > g->k) {
        memset(end, 0, sizeof end);
        from = memcpy(end, from, (g->k - k) * size);
    }
#pragma GCC unroll 4
    for (int i = 0; i < INT8_BLOCK / 8; i++) inputs[i] = eight_inputs(from + i * 8 * size, g->x_bf16);
}

INLINE __m256i abs_bits(__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }

/* Returns the bits of the largest magnitude of a block. Those of an infinity or a NaN are larger than all others. */
INLINE uint32_t largest_bits(const __m256 *x) {
    __m256i largest = _mm256_max_epi32(_mm256_max_epi32(abs_bits(x[0]), abs_bits(x[1])),
                                       _mm256_max_epi32(abs_bits(x[2]), abs_bits(x[3])));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

/* Returns 16 numbers times `factor` as bytes, in order. */
INLINE __m128i rounded_bytes(__m256 first, __m256 second, __m256 factor) {
    __m256i left = _mm256_cvtps_epi32(_mm256_mul_ps(first, factor));
    __m256i right = _mm256_cvtps_epi32(_mm256_mul_ps(second, factor));
    __m256i mixed = _mm256_permute4x64_epi64(_mm256_packs_epi32(left, right), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(mixed), _mm256_extracti128_si256(mixed, 1));
}

/* Returns the sum of 16 signed bytes. */
INLINE int32_t sum_of_bytes(__m128i bytes) {
    __m128i raised = _mm_xor_si128(bytes, _mm_set1_epi8((char)0x80));
    __m128i sums = _mm_sad_epu8(raised, _mm_setzero_si128());
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 16 * 128;
}

/* Rounds a block of inputs. Returns the value of integer 1. x: [4]; bytes: [2]; sums: the sum of each half */
INLINE float round_block(const __m256 *x, __m128i *bytes, int32_t *sums) {
    const uint32_t infinity = 0x7f800000;
    uint32_t bits = largest_bits(x);
    float largest;
    __builtin_memcpy(&largest, &bits, sizeof largest);
    if (bits < SMALLEST_INT8_BITS || bits >= infinity) {
        bytes[0] = bytes[1] = _mm_setzero_si128();
        sums[0] = sums[1] = 0;
        return bits >= infinity ? __builtin_nanf("") : 0;
    }
    for (int half = 0; half < 2; half++) {
        bytes[half] = rounded_bytes(x[2 * half], x[2 * half + 1], _mm256_set1_ps(127 / largest));
        sums[half] = sum_of_bytes(bytes[half]);
    }
    return largest / 127;
}

/* Stores the words of 16 inputs, `rows` words apart. */
INLINE void store_words(__m128i bytes, int by_parity, int32_t *words, long rows) {
    if (by_parity)
        bytes = _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    words[0] = _mm_extract_epi32(bytes, 0), words[rows] = _mm_extract_epi32(bytes, 1);
    words[2 * rows] = _mm_extract_epi32(bytes, 2), words[3 * rows] = _mm_extract_epi32(bytes, 3);
}

/* Rounds one row x [K]. to: the arrays of its strip, at the row */
NOINLINE void round_row(const Gemm *g, const char *x, const CodeBytes *codes, long rows, Int8Rows to) {
    const Weight *w = g->weight;
    long in_block = INT8_BLOCK / piece_inputs(w), pieces = int8_pieces(w);
    float group_sum = 0;
    for (long b = 0; b < int8_blocks(w); b++, to.words += INT8_BLOCK / 4 * rows) {
        __m256 inputs[INT8_BLOCK / 8];
        __m128i bytes[2];
        int32_t sums[2];
        load_block(g, x, b * INT8_BLOCK, inputs);
        float scale = round_block(inputs, bytes, sums) * w->factor;
        to.scales[b * rows] = scale * codes->unit;
        for (int half = 0; half < 2; half++)
            store_words(bytes[half], w->kind != INT8_INPUTS8, to.words + half * 4 * rows, rows);
        for (long p = b * in_block; p < min_long((b + 1) * in_block, pieces); p++) {
            int32_t sum = in_block == 1 ? sums[0] + sums[1] : sums[p % 2];
            to.starts[p * rows] = -codes->offset * sum;
            if (!w->has_minimum) continue;
            long end = min_long((p + 1) * piece_inputs(w), w->k);
            group_sum = __builtin_fmaf(scale, (float)sum, group_sum);
            if (end % w->group && end < w->k) continue;
            to.sums[(end - 1) / w->group * rows] = group_sum;
            group_sum = 0;
        }
    }
}

/* Rounds a block of rows x [rows, K], strip by strip. */
static void round_rows(const Gemm *g, const char *x, const Strips *s, char *buffer) {
    CodeBytes *codes = int8_codes(buffer);
    *codes = code_bytes(g->weight);
    for (long i = 0; i < s->count; i++) {
        long rows = s->strip[i].rows;
        Int8Rows to = int8_strip(g->weight, buffer, s->strip[i].row, rows);
        for (long r = 0; r < rows; r++, x += row_bytes(g))
            round_row(g, x, codes, rows, (Int8Rows){to.words + r, to.starts + r, to.scales + r, to.sums + r});
    }
}
