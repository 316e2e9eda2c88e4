/* Short causal convolutions over the rows of a sequence, for each channel by itself. `tails` keeps the last inputs of
 * each sequence from step to step.
 *
 * An output depends on the inputs of its own row and of the taps - 1 rows before it. It does not matter which of these
 * rows are in this step and which are in `tails`. */
#pragma once
#include "simd.h"
#include "model_limits.h"
#include "recurrent.h"
#include <string.h>

typedef struct {
    const char *rows;  /* [T] rows of `stride` bytes; the first `bytes` bytes of a row are its inputs */
    long stride, bytes;
    char *tails;       /* [slots, taps - 1] rows of `bytes` bytes: the last inputs, the oldest first */
    const float *conv; /* [taps, width] */
    long taps, width;
    const RecurrentStep *step;
} Convolution;

INLINE long rows_of(const RecurrentStep *s) { return s->query_start_loc[s->seqs]; }

/* Returns the index of the sequence to which a row belongs. */
static long sequence_of(const Convolution *c, long row) {
    long low = 0, high = c->step->seqs - 1;
    while (low < high) {
        long middle = (low + high + 1) / 2;
        if (c->step->query_start_loc[middle] <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Returns the input `back` rows before a row. Returns NULL before the sequence's first row, where inputs are zero. */
INLINE const char *input_before(const Convolution *c, long seq, long row, long back) {
    long at = row - c->step->query_start_loc[seq] - back, slot = c->step->read_slots[seq];
    if (at >= 0) return c->rows + (row - back) * c->stride;
    return slot < 0 ? NULL : c->tails + (slot * (c->taps - 1) + c->taps - 1 + at) * c->bytes;
}

/* Finds the inputs for the convolution at a row: one for each tap, the oldest first. */
INLINE void find_inputs(const Convolution *c, long row, const char *inputs[MAX_TAPS]) {
    long seq = sequence_of(c, row);
    for (long tap = 0; tap < c->taps; tap++) inputs[tap] = input_before(c, seq, row, c->taps - 1 - tap);
}

/* Returns the convolution's outputs for channels [i, i + SIMD_WIDTH). fused: if true, uses fused multiply-adds, which
 * do not round the products. */
INLINE vf convolved(const Convolution *c, const char *const inputs[MAX_TAPS], long i, int is_bf16, int fused) {
    vf sum = {0};
    for (long tap = 0; tap < c->taps; tap++) {
        if (!inputs[tap]) continue;
        vf weight = load(c->conv + tap * c->width, i, c->width, 0), x = load(inputs[tap], i, c->width, is_bf16);
        sum = fused ? simd_fma(weight, x, sum) : sum + rounded_product(weight, x);
    }
    return sum;
}

/* Stores the last inputs of a sequence in its write slot. Its read slot and its write slot may be the same. */
INLINE void keep_tail(const Convolution *c, long seq) {
    long end = c->step->query_start_loc[seq + 1];
    if (end == c->step->query_start_loc[seq]) return;
    char *tail = c->tails + c->step->write_slots[seq] * (c->taps - 1) * c->bytes;
    for (long tap = 0; tap < c->taps - 1; tap++, tail += c->bytes) {
        const char *input = input_before(c, seq, end - 1, c->taps - 2 - tap);
        if (input)
            memmove(tail, input, c->bytes);
        else
            memset(tail, 0, c->bytes);
    }
}
