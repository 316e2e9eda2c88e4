/* Products of four-bit codes from 0 to 15 with integers of 16 bits, a byte of an integer at a time: an instruction
 * multiplies twice as many bytes as it multiplies pairs, and codes need not be widened. The upper byte of an integer has
 * its sign, the lower is positive: so the sums of products are 256 * those of upper bytes + those of lower bytes. */
#pragma once
#include "gemm/integer/dot_bytes.h"
#include "gemm/integer/integer_codes.h"

typedef struct {
    vi of[FEW_INTEGER_ROWS][PANEL_REGISTERS];    /* of all products, or of those with lower bytes */
    vi upper[FEW_INTEGER_ROWS][PANEL_REGISTERS]; /* of those with upper bytes */
} IntegerSums;

#ifdef HAS_DOT_BYTES
#elif SIMD_WIDTH == 16
#define ADD_BYTE_PAIRS(unsigned_bytes, signed_bytes) _mm512_maddubs_epi16((__m512i)(unsigned_bytes), (__m512i)(signed_bytes))
#define ADD_16(a, b) _mm512_add_epi16(a, b)
#define WIDEN_16(a) (vi)_mm512_madd_epi16(a, _mm512_set1_epi16(1))
#else
#define ADD_BYTE_PAIRS(unsigned_bytes, signed_bytes) _mm256_maddubs_epi16((__m256i)(unsigned_bytes), (__m256i)(signed_bytes))
#define ADD_16(a, b) _mm256_add_epi16(a, b)
#define WIDEN_16(a) (vi)_mm256_madd_epi16(a, _mm256_set1_epi16(1))
#endif

/* Adds the products of a block of 16 inputs for one register of columns and one row. codes: of even and odd inputs of
 * each octet. x: the octets' bytes (see IntegerRows), of `rows` rows. */
INLINE void add_bytes(vi *lower, vi *upper, const vu *codes, const int32_t *x, const int rows) {
#ifdef HAS_DOT_BYTES
    for (int i = 0; i < 4; i++, x += (i == 2 ? 3 : 1) * rows) {
        *upper = dot_signed(*upper, codes[i], broadcast_pair(x));
        *lower = dot_unsigned(*lower, codes[i], broadcast_pair(x + 2 * rows));
    }
#else /* four sums of two products are at most 4 * 2 * 15 * 255, which fits in 16 bits */
    vu inputs[8];
    for (int i = 0; i < 8; i++) inputs[i] = (vu)broadcast_pair(x + i * rows);
    *upper += WIDEN_16(ADD_16(ADD_16(ADD_BYTE_PAIRS(codes[0], inputs[0]), ADD_BYTE_PAIRS(codes[1], inputs[1])),
                              ADD_16(ADD_BYTE_PAIRS(codes[2], inputs[4]), ADD_BYTE_PAIRS(codes[3], inputs[5]))));
    *lower += WIDEN_16(ADD_16(ADD_16(ADD_BYTE_PAIRS(inputs[2], codes[0]), ADD_BYTE_PAIRS(inputs[3], codes[1])),
                              ADD_16(ADD_BYTE_PAIRS(inputs[6], codes[2]), ADD_BYTE_PAIRS(inputs[7], codes[3]))));
#endif
}

/* Multiplies by one block of 16 inputs. `rows` is a constant wherever this is inlined. */
INLINE void multiply_bytes(const char *block, const int32_t *x, IntegerSums *sums, const int rows) {
    for (int j = 0; j < PANEL_REGISTERS; j++) {
        vu codes[4];
        for (int octet = 0; octet < 2; octet++) {
            vu words = load_words(block + (octet * PANEL + j * SIMD_WIDTH) * 4);
            codes[octet * 2] = words & 0x0f0f0f0fu, codes[octet * 2 + 1] = (words >> 4) & 0x0f0f0f0fu;
        }
        for (int r = 0; r < rows; r++) add_bytes(&sums->of[r][j], &sums->upper[r][j], codes, x + r, rows);
    }
}
