/* Reads rows of an embedding that is stored in a block format of GGUF, or whose codes are in a packed weight.
 *
 * Compiled without fused multiply-add, so that a row has the bits of QuantizedWeight.dequantize: a code's number times
 * its scale, plus the minimum, rounded after each step. */
#include "intrinsics.h"
#include "unpack_blocks.h"
#include "weight.h"
#include <string.h>

enum { MANY = 1 << 14 }; /* from this many numbers on, several threads are faster than one */

/* What a block's codes mean. values: the number of each code; NULL: a code is a signed integer of `bits` bits */
typedef struct {
    const BlockFormat *format;
    const uint8_t *grid; /* NULL for formats without one */
    const float *values;
    int bits;
} Meaning;

/* The codes, scales and minimums of a block. */
typedef struct {
    uint8_t codes[MAX_BLOCK_NUMBERS];
    float scale[MAX_BLOCK_GROUPS], minimum[MAX_BLOCK_GROUPS];
} Block;

/* Returns the bits of the bfloat16 that is nearest to a number; if two are, the even one. */
static inline uint16_t nearest_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

USES_AVX2 static void block_numbers(const Meaning *of, const Block *block, float *numbers) {
    int size = of->format->numbers / of->format->groups, unused = 8 - of->bits;
    if (of->values)
        for (int i = 0; i < of->format->numbers; i++) numbers[i] = of->values[block->codes[i]];
    else
        for (int i = 0; i < of->format->numbers; i++) numbers[i] = (int8_t)(block->codes[i] << unused) >> unused;
    for (int group = 0; group < of->format->groups; group++, numbers += size) {
        for (int i = 0; i < size; i++) numbers[i] *= block->scale[group];
        if (of->format->has_minimum)
            for (int i = 0; i < size; i++) numbers[i] += block->minimum[group];
    }
}

/* Writes the numbers of block `at` of all blocks in `out`, which has bfloat16 or float32 numbers. */
USES_AVX2 static void write_block(const Meaning *of, const Block *block, void *out, long at, int bf16) {
    if (!bf16) {
        block_numbers(of, block, (float *)out + at * of->format->numbers);
        return;
    }
    float numbers[MAX_BLOCK_NUMBERS];
    block_numbers(of, block, numbers);
    uint16_t *to = (uint16_t *)out + at * of->format->numbers;
    for (int i = 0; i < of->format->numbers; i++) to[i] = nearest_bf16(numbers[i]);
}

static int outside(const int64_t *ids, long count, long n) {
    for (long i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= n) return 1;
    return 0;
}

/* Writes the rows `ids` [count] of a table of n rows, each of `blocks` blocks, to `out` [count, blocks * numbers], in
 * bfloat16 if `bf16`, else in float32. Returns 1, and writes nothing, if an id is not in [0, n), else 0.
 * format: an index into BLOCK_FORMATS; grid, values, bits: as in Meaning */
__attribute__((visibility("default"))) int block_rows(int format, const uint8_t *grid, const float *values, int bits,
                                                      const uint8_t *table, long n, long blocks, const int64_t *ids,
                                                      long count, void *out, int bf16, int threads) {
    Meaning of = {&BLOCK_FORMATS[format], grid, values, bits};
    if (outside(ids, count, n)) return 1;
    long all = count * blocks;
#pragma omp parallel for num_threads(threads) if (all * of.format->numbers >= MANY)
    for (long at = 0; at < all; at++) {
        Block block;
        const uint8_t *stored = table + (ids[at / blocks] * blocks + at % blocks) * of.format->bytes;
        unpack_block(of.format, grid, stored, block.codes, block.scale, block.minimum);
        write_block(&of, &block, out, at, bf16);
    }
    return 0;
}

/* Where the 16 codes of a column are in a block of codes (pack_codes.c): code i is in byte at[i], from bit shift[i] on.
 * The upper two bits of a 6-bit code are in byte upper[i], from bit upper_shift[i] on. */
typedef struct {
    int at[CODE_BLOCK], shift[CODE_BLOCK], upper[CODE_BLOCK], upper_shift[CODE_BLOCK];
} Places;

static Places places_of(const Weight *w, CodeOrder order, int c) {
    enum { HALF = PANEL / 2 };
    Places p;
    int *at = p.at, *shift = p.shift;
    for (int i = 0; i < CODE_BLOCK; i++) {
        int octet = i / 8, in_octet = i % 8, half = c / HALF, in_half = c % HALF;
        shift[i] = 0;
        p.upper[i] = (2 * PANEL + c) * 4 + in_octet / 2, p.upper_shift[i] = octet * 4 + in_octet % 2 * 2;
        if (code_bits(w) < 8) {
            int pairs = order == FOR_BF16_PAIRS, place = pairs ? in_octet % 2 * 4 + in_octet / 2 : in_octet;
            int word = pairs ? half * PANEL + octet * HALF + in_half : octet * PANEL + c;
            at[i] = 4 * word + place / 2;
            shift[i] = place % 2 * 4;
        } else if (order == FOR_INT8) {
            at[i] = (i / 4 * PANEL + c) * 4 + i % 4;
        } else if (order == FOR_INTEGERS) {
            at[i] = (octet * 4 + in_octet % 4) * 2 * PANEL + half * PANEL + in_half * 2 + in_octet / 4;
        } else {
            at[i] = order == FOR_BF16_PAIRS ? (half * CODE_BLOCK + i) * HALF + in_half : i * PANEL + c;
        }
    }
    return p;
}

/* Reads the 16 codes of a column in the block `from`. */
static inline void read_codes(const Weight *w, const Places *p, const char *from, int flip, uint8_t *codes) {
    int mask = code_bits(w) < 8 ? 15 : 255;
    for (int i = 0; i < CODE_BLOCK; i++) codes[i] = ((uint8_t)from[p->at[i]] >> p->shift[i] & mask) ^ flip;
    for (int i = 0; code_bits(w) == 6 && i < CODE_BLOCK; i++)
        codes[i] ^= ((uint8_t)from[p->upper[i]] >> p->upper_shift[i] & 3) << 4;
}

/* As block_rows, for a table whose codes are those of a packed weight, and whose scales and minimums are in the bytes
 * of each block from `begin` on. They are needed because the weight's own have only 11 bits.
 * scales: these bytes, [n, blocks, length]; order, flip: as for pack_codes. Codes of 6 bits are signed integers. */
__attribute__((visibility("default"))) int packed_rows(int format, const uint8_t *grid, const float *values, int bits,
                                                       const Weight *w, CodeOrder order, int flip,
                                                       const uint8_t *scales, int begin, int length, const int64_t *ids,
                                                       long count, void *out, int bf16, int threads) {
    Meaning of = {&BLOCK_FORMATS[format], grid, values, code_bits(w) == 6 ? 6 : bits};
    if (outside(ids, count, w->n)) return 1;
    long blocks = w->k / of.format->numbers, of_group = w->group / CODE_BLOCK;
#pragma omp parallel for num_threads(threads) if (count * w->k >= MANY)
    for (long row = 0; row < count; row++) {
        Places places = places_of(w, order, ids[row] % PANEL);
        for (long b = 0; b < blocks; b++) {
            Block block;
            uint8_t stored[MAX_BLOCK_BYTES];
            memcpy(stored + begin, scales + (ids[row] * blocks + b) * length, length);
            unpack_block(of.format, grid, stored, 0, block.scale, block.minimum);
            for (long i = 0; i < of.format->numbers; i += CODE_BLOCK) {
                long code_block = (b * of.format->numbers + i) / CODE_BLOCK;
                const char *from = group_at(w, ids[row] / PANEL, code_block / of_group) + group_head_bytes(w) +
                                   code_block % of_group * code_block_bytes(w);
                read_codes(w, &places, from, flip, block.codes + i);
            }
            write_block(&of, &block, out, row * blocks + b, bf16);
        }
    }
    return 0;
}
