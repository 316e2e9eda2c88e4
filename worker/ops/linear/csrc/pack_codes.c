/* Packs codes [n, k] with their scales and minimums in the order in which the matmuls read them (see weight.h).
 *
 * Kernels that multiply fp32 numbers or integers read 4-bit codes from 32-bit words. A word holds 8 inputs of a column,
 * the first in the lowest bits: [2 octets][32 columns]. Kernels that multiply pairs of bf16 read 4-bit codes from
 * 16-bit words. A word holds the 4 even or the 4 odd inputs of an octet, so neighbouring words give pairs: [2 halves][2
 * octets] [16 columns][even inputs, odd inputs]. 8-bit codes are bytes: [16 inputs][32 columns] for fp32, [2 halves][8
 * pairs] [even input, odd input][16 columns] for bf16 pairs, and [2 octets][i = 0 to 3][32 columns][input i, input i +
 * 4] for integers of 16 bits, and [4 quads][32 columns][4 inputs] for integers of 8 bits.
 *
 * 6-bit codes are read by kernels that multiply integers: their lower four bits as 4-bit codes, then a word for each
 * column with the upper two bits of its 16 inputs: [32 columns]. Byte i of a word has those of the inputs 2 * i,
 * 2 * i + 1, 8 + 2 * i and 9 + 2 * i, the first in the lowest bits. So one shift gives the upper bits of four inputs,
 * each in the byte in which its lower bits are.
 *
 * `flip` is a mask of bits to invert in every 4-bit or 6-bit code. The highest bit turns two's complement into codes that
 * increase with their values, for which kernels that multiply integers need no table.
 *
 * A strip of 4 blocks is copied first, because a column's codes of these 4 blocks fill one cache line. */
#include "weight.h"
#include "intrinsics.h"
#include "unpack_blocks.h"
#include <omp.h>
#include <string.h>

enum { STRIP = 4 * CODE_BLOCK, HALF = PANEL / 2 };

typedef uint8_t Strip[PANEL][STRIP]; /* codes of neighbouring inputs, zeros outside of the weight */

static void copy_strip(Strip strip, const Weight *w, const uint8_t *codes, long column, long input) {
    long inputs = w->k - input < STRIP ? w->k - input : STRIP;
    for (long c = 0; c < PANEL; c++) {
        long inside = column + c < w->n && inputs > 0 ? inputs : 0;
        if (inside == STRIP) {
            memcpy(strip[c], codes + (column + c) * w->k + input, STRIP);
            continue;
        }
        memset(strip[c], 0, STRIP);
        if (inside) memcpy(strip[c], codes + (column + c) * w->k + input, inside);
    }
}

/* Packs a block of 4-bit codes. The 16 codes of each column become two 32-bit words, one for each octet of inputs. */
USES_AVX2 static inline void pack_four_bits(Strip strip, long input, char *to, int flip, int pairs) {
    const __m128i even_then_odd = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i low_and_high = _mm_set1_epi16(16 << 8 | 1); /* every other code is shifted by four bits */
    for (long c = 0; c < PANEL; c++) {
        __m128i codes = _mm_xor_si128(_mm_loadu_si128((const void *)&strip[c][input]), _mm_set1_epi8(flip));
        if (pairs) codes = _mm_shuffle_epi8(codes, even_then_odd);
        __m128i bytes = _mm_maddubs_epi16(codes, low_and_high);
        uint64_t octets = _mm_cvtsi128_si64(_mm_packus_epi16(bytes, bytes));
        uint32_t *words = (uint32_t *)to + (pairs ? c / HALF * PANEL + c % HALF : c);
        words[0] = octets;
        words[pairs ? HALF : PANEL] = octets >> 32;
    }
}

/* Packs a block of 6-bit codes. */
USES_AVX2 static inline void pack_six_bits(Strip strip, long input, char *to, int flip) {
    const __m128i even_then_odd = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    Strip lower;
    uint32_t *words = (uint32_t *)(to + CODE_BLOCK * PANEL / 2);
    for (long c = 0; c < PANEL; c++) {
        __m128i codes = _mm_xor_si128(_mm_loadu_si128((const void *)&strip[c][input]), _mm_set1_epi8(flip));
        _mm_storeu_si128((void *)&lower[c][input], _mm_and_si128(codes, _mm_set1_epi8(15)));
        uint32_t upper[4]; /* the even and the odd inputs of the first octet, then those of the second */
        codes = _mm_and_si128(_mm_srli_epi16(codes, 4), _mm_set1_epi8(3));
        _mm_storeu_si128((void *)upper, _mm_shuffle_epi8(codes, even_then_odd));
        words[c] = upper[0] | upper[1] << 2 | upper[2] << 4 | upper[3] << 6;
    }
    pack_four_bits(lower, input, to, 0, 0);
}

/* Transposes 16 columns of 16 codes. Interleaving rows i and i + 8 rotates the bits of every index (row, column) by
 * one; after four times, row and column have changed places. */
USES_AVX2 static inline void transpose_bytes(Strip strip, long column, long input, __m128i *rows) {
    __m128i mixed[16];
    for (int i = 0; i < 16; i++) rows[i] = _mm_loadu_si128((const void *)&strip[column + i][input]);
#pragma GCC unroll 4
    for (int pass = 0; pass < 4; pass++) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            mixed[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + 8]);
            mixed[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + 8]);
        }
        memcpy(rows, mixed, sizeof(mixed));
    }
}

/* Packs a block of 8-bit codes, for one half (16 columns) of the panel. */
USES_AVX2 static inline void pack_eight_bits(Strip strip, long half, long input, char *to, CodeOrder order) {
    __m128i rows[16];
    transpose_bytes(strip, half * HALF, input, rows);
    if (order != FOR_INTEGERS) {
        to += half * HALF * (order == FOR_BF16_PAIRS ? CODE_BLOCK : 1);
        for (int i = 0; i < 16; i++) _mm_storeu_si128((void *)(to + i * (order == FOR_BF16_PAIRS ? HALF : PANEL)), rows[i]);
        return;
    }
    to += half * PANEL;
    for (int octet = 0; octet < 16; octet += 8)
        for (int i = octet; i < octet + 4; i++, to += 2 * PANEL) {
            _mm_storeu_si128((void *)to, _mm_unpacklo_epi8(rows[i], rows[i + 4]));
            _mm_storeu_si128((void *)(to + HALF), _mm_unpackhi_epi8(rows[i], rows[i + 4]));
        }
}

USES_AVX2 static void pack_block(const Weight *w, Strip strip, long input, char *to, CodeOrder order, int flip) {
    if (has_four_bits(w)) {
        order == FOR_BF16_PAIRS ? pack_four_bits(strip, input, to, flip, 1) : pack_four_bits(strip, input, to, flip, 0);
        return;
    }
    if (code_bits(w) == 6) {
        pack_six_bits(strip, input, to, flip);
        return;
    }
    if (order == FOR_INT8) {
        for (long c = 0; c < PANEL; c++)
            for (long quad = 0; quad < 4; quad++)
                memcpy(to + (quad * PANEL + c) * 4, &strip[c][input + quad * 4], 4);
        return;
    }
    for (long half = 0; half < 2; half++) pack_eight_bits(strip, half, input, to, order);
}

/* Stores a group's scales or minimums, one for each column, divided by the weight's factor (a power of two). Stores
 * zeros beyond the last column. */
USES_AVX2 static void pack_numbers(const Weight *w, const float *numbers, char *to, long column, long group) {
    const __m256i eight = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i of_columns = _mm256_mullo_epi32(_mm256_set1_epi32(group_count(w)), eight);
    const float *from = numbers + column * group_count(w) + group;
    float panel[PANEL] = {0};
    if (column + PANEL <= w->n)
        for (long c = 0; c < PANEL; c += 8)
            _mm256_storeu_ps(panel + c, _mm256_i32gather_ps(from + c * group_count(w), of_columns, 4));
    else
        for (long c = 0; column + c < w->n; c++) panel[c] = from[c * group_count(w)];
    for (long c = 0; c < PANEL; c++) panel[c] /= w->factor;
    if (w->scale_bytes == 4)
        memcpy(to, panel, sizeof(panel));
    else
        for (long c = 0; c < PANEL; c += 8)
            _mm_storeu_si128((void *)(to + 2 * c), _mm256_cvtps_ph(_mm256_loadu_ps(panel + c), 0));
}

static void pack_panel(const Weight *w, const uint8_t *codes, const float *scale, const float *minimum, long column,
                       CodeOrder order, int flip) {
    Strip strip;
    long blocks = w->group / CODE_BLOCK;
    for (long g = 0, block = 0; g < group_count(w); g++) {
        char *to = (char *)group_at(w, column / PANEL, g);
        pack_numbers(w, scale, to, column, g);
        if (w->has_minimum) pack_numbers(w, minimum, to + PANEL * w->scale_bytes, column, g);
        to += group_head_bytes(w);
        for (long b = 0; b < blocks; b++, block++, to += code_block_bytes(w)) {
            long input = block * CODE_BLOCK % STRIP;
            if (input == 0) copy_strip(strip, w, codes, column, block * CODE_BLOCK);
            pack_block(w, strip, input, to, order, flip);
        }
    }
}

/* codes: [n, k] bytes; scale, minimum: [n, groups]. */
__attribute__((visibility("default"))) void pack_codes(const Weight *w, const uint8_t *codes, const float *scale,
                                                       const float *minimum, CodeOrder order, int flip,
                                                       int threads) {
#pragma omp parallel for num_threads(threads)
    for (long column = 0; column < w->n; column += PANEL) pack_panel(w, codes, scale, minimum, column, order, flip);
}

/* Unpacks rows [n, k] in a block format and packs them, panel by panel, so that the codes of a panel stay in the cache.
 * scratch: for each thread PANEL * (k + 8 * groups) bytes. The other arguments are those of unpack_blocks and of
 * pack_codes. */
__attribute__((visibility("default"))) void pack_blocks(const Weight *w, int format, const uint8_t *grid,
                                                        const uint8_t *rows, char *scratch, CodeOrder order, int flip,
                                                        int threads) {
    const BlockFormat *f = &BLOCK_FORMATS[format];
    long blocks = w->k / f->numbers, groups = group_count(w);
#pragma omp parallel for num_threads(threads)
    for (long column = 0; column < w->n; column += PANEL) {
        float *scale = (float *)(scratch + omp_get_thread_num() * PANEL * (w->k + 8 * groups));
        float *minimum = scale + PANEL * groups;
        uint8_t *codes = (uint8_t *)(minimum + PANEL * groups);
        Weight panel = *w;
        panel.panels = group_at(w, column / PANEL, 0);
        panel.n = w->n - column < PANEL ? w->n - column : PANEL;
        for (long c = 0; c < panel.n; c++)
            unpack_row(f, grid, rows + (column + c) * blocks * f->bytes, blocks, c * blocks, codes, scale, minimum);
        pack_panel(&panel, codes, scale, minimum, 0, order, flip);
    }
}
