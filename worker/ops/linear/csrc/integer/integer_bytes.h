/* Products of codes from 0 to 15, or from 0 to 63, with 16-bit integers, one byte of the integer at a time. This is
 * faster: an instruction multiplies twice as many bytes as 16-bit numbers, and codes need not be widened. The upper byte of an
 * integer is signed, the lower byte unsigned. So a sum of products is 256 * (sum over upper bytes) + (sum over lower
 * bytes). */
#pragma once
#include "dot_bytes.h"
#include "integer_codes.h"

#ifdef HAS_DOT_BYTES
#elif SIMD_WIDTH == 16
typedef __m512i REGISTER_16;
#define ADD_BYTE_PAIRS(unsigned_bytes, signed_bytes) _mm512_maddubs_epi16((__m512i)(unsigned_bytes), (__m512i)(signed_bytes))
#define ADD_16(a, b) _mm512_add_epi16(a, b)
#define WIDEN_16(a) (vi)_mm512_madd_epi16(a, _mm512_set1_epi16(1))
#else
typedef __m256i REGISTER_16;
#define ADD_BYTE_PAIRS(unsigned_bytes, signed_bytes) _mm256_maddubs_epi16((__m256i)(unsigned_bytes), (__m256i)(signed_bytes))
#define ADD_16(a, b) _mm256_add_epi16(a, b)
#define WIDEN_16(a) (vi)_mm256_madd_epi16(a, _mm256_set1_epi16(1))
#endif

/* Adds the products of a block of 16 inputs for one register of columns and one row. codes: for each octet, the codes
 * of its even and of its odd inputs. x: the bytes of the octets (see IntegerRows) in a strip of `rows` rows. Callers pass
 * a constant `six_bits`: whether codes may be larger than 15. */
INLINE void add_bytes(vi *lower, vi *upper, const vu *codes, const int32_t *x, const int six_bits, const int rows) {
#ifdef HAS_DOT_BYTES
    for (int i = 0; i < 4; i++, x += (i == 2 ? 3 : 1) * rows) {
        *upper = dot_signed(*upper, codes[i], broadcast_pair(x));
        *lower = dot_unsigned(*lower, codes[i], broadcast_pair(x + 2 * rows));
    }
    (void)six_bits;
#else /* the sum of four times two products is at most 4 * 2 * 15 * 255, which fits in 16 bits */
    vu inputs[8];
    for (int i = 0; i < 8; i++) inputs[i] = (vu)broadcast_pair(x + i * rows);
    REGISTER_16 first = ADD_16(ADD_BYTE_PAIRS(codes[0], inputs[0]), ADD_BYTE_PAIRS(codes[1], inputs[1]));
    REGISTER_16 second = ADD_16(ADD_BYTE_PAIRS(codes[2], inputs[4]), ADD_BYTE_PAIRS(codes[3], inputs[5]));
    if (six_bits) { /* here, 2 * 2 * 63 * 128 fits, and 2 * 63 * 255 */
        *upper += WIDEN_16(first) + WIDEN_16(second);
        for (int i = 0; i < 4; i++) *lower += WIDEN_16(ADD_BYTE_PAIRS(inputs[2 + i % 2 + i / 2 * 4], codes[i]));
        return;
    }
    *upper += WIDEN_16(ADD_16(first, second));
    *lower += WIDEN_16(ADD_16(ADD_16(ADD_BYTE_PAIRS(inputs[2], codes[0]), ADD_BYTE_PAIRS(inputs[3], codes[1])),
                              ADD_16(ADD_BYTE_PAIRS(inputs[6], codes[2]), ADD_BYTE_PAIRS(inputs[7], codes[3]))));
#endif
}

/* Reads the blocks of a part. The first register of columns reads the blocks, and keeps their addresses for the other
 * columns. */
typedef struct {
    CodeReader codes;
    const char *blocks[MAX_PARTS];
} PartReader;

INLINE const char *block_of_part(PartReader *part, long i, int column) {
    if (!column) part->blocks[i] = next_block(&part->codes);
    return part->blocks[i];
}

/* Computes the sums of products of a part for `rows` rows and `registers` registers of columns, from `column` on. The
 * part has `count` blocks of 16 inputs. The first columns read the blocks one by one, so that prefetches are spread
 * over the work. Callers pass constants for `six_bits`, `rows` and `registers`. */
INLINE void sum_bytes(PartReader *part, long count, int column, const int32_t *x, const int32_t *starts,
                      vi sum[][PANEL_REGISTERS], const int six_bits, const int rows, const int registers) {
    vi lower[FEW_BYTE_ROWS][PANEL_REGISTERS], upper[FEW_BYTE_ROWS][PANEL_REGISTERS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) lower[r][j] = broadcast_pair(starts + r), upper[r][j] = (vi){0};
    for (long i = 0; i < count; i++, x += CODE_BLOCK / 2 * rows) {
        const char *block = block_of_part(part, i, column);
        for (int j = 0; j < registers; j++) {
            vu codes[4];
            for (int octet = 0; octet < 2; octet++)
                read_octet(block, octet, column + j * SIMD_WIDTH, six_bits, codes + 2 * octet);
            for (int r = 0; r < rows; r++) add_bytes(&lower[r][j], &upper[r][j], codes, x + r, six_bits, rows);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sum[r][j] = lower[r][j] + (upper[r][j] << 8);
}
