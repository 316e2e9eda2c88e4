/* Cuts blocks of rows into strips, whose sums stay in registers. */
#pragma once
#include "buffers.h"

#define MAX_BLOCK_ROWS 512 /* the most rows of a block */

/* The most rows whose sums (two registers each) fit in registers. FOR_STRIP_ROWS(X) is X(1) ... X(MAX_STRIP_ROWS). */
#if SIMD_WIDTH == 16
#define MAX_STRIP_ROWS 12
#define FOR_STRIP_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define MAX_STRIP_ROWS 6
#define FOR_STRIP_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

/* A block of rows, cut evenly into strips of at most MAX_STRIP_ROWS rows. */
typedef struct {
    long count;
    struct {
        long row, rows;
    } strip[MAX_BLOCK_ROWS / MAX_STRIP_ROWS + 1];
} Strips;

static void cut_strips(Strips *s, long rows) {
    s->count = ceil_div(rows, MAX_STRIP_ROWS);
    for (long i = 0; i < s->count; i++) {
        long row = i * rows / s->count, end = (i + 1) * rows / s->count;
        s->strip[i].row = row, s->strip[i].rows = end - row;
    }
}

/* Returns how many registers of columns a strip computes together. With few rows it is all columns of the panel, to
 * have enough independent sums to hide the latency of multiply-adds. */
#define registers_at_once(rows) ((rows) * PANEL_REGISTERS <= 12 ? PANEL_REGISTERS : 2)

/* Returns how many rows of a strip of integers are multiplied together; the other rows follow. The sums of a group and
 * those of all groups of six rows fit in the registers of AVX-512, those of twelve rows do not. */
#if SIMD_WIDTH == 16
#define integer_rows_at_once(rows) ((rows) <= 6 ? (rows) : ((rows) + 1) / 2)
#else
#define integer_rows_at_once(rows) (rows)
#endif

/* Returns the rows of a block: about as many as fit in 768 KB, but at most 192 and at least 48. */
INLINE long rows_of_block(const Gemm *g, size_t row_bytes) {
    long most = min_long((768L << 10) / row_bytes / MAX_STRIP_ROWS * MAX_STRIP_ROWS, 192);
    return even_blocks(g->t, max_long(most, 48), MAX_STRIP_ROWS);
}
