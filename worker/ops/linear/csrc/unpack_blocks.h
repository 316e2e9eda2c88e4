/* GGUF's block formats: a block of numbers becomes codes, scales and minimums (unpack_blocks.c). */
#pragma once
#include <stdint.h>

enum { MAX_BLOCK_NUMBERS = 256, MAX_BLOCK_GROUPS = 16, MAX_BLOCK_BYTES = 256 };

/* A format has one of both functions, which unpack one block: the second one reads a grid. codes: NULL if only scales
 * and minimums are wanted. minimum: written only by formats with minimums. */
typedef struct {
    void (*unpack)(const uint8_t *block, uint8_t *codes, float *scale, float *minimum);
    void (*unpack_grid)(const uint8_t *block, const uint8_t *grid, uint8_t *codes, float *scale);
    int numbers, bytes, groups, has_minimum; /* how many of these a block has; has_minimum: 1 if it has minimums */
} BlockFormat;

extern const BlockFormat BLOCK_FORMATS[];

static inline void unpack_block(const BlockFormat *format, const uint8_t *grid, const uint8_t *block, uint8_t *codes,
                                float *scale, float *minimum) {
    if (format->unpack)
        format->unpack(block, codes, scale, minimum);
    else
        format->unpack_grid(block, grid, codes, scale);
}

/* Unpacks a row, and writes what its blocks have from block `first` on. minimum: NULL if the format has no minimums. */
static inline void unpack_row(const BlockFormat *format, const uint8_t *grid, const uint8_t *row, long blocks, long first,
                              uint8_t *codes, float *scale, float *minimum) {
    for (long b = first; b < first + blocks; b++, row += format->bytes)
        unpack_block(format, grid, row, codes + b * format->numbers, scale + b * format->groups,
                     format->has_minimum ? minimum + b * format->groups : 0);
}
