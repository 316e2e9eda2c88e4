/* Short causal convolutions of each channel of a sequence, with the last inputs of the steps before in `tails`.
 *
 * An output depends on the inputs of its row and of the taps - 1 rows before, whichever of them are in this step. */
#pragma once
#include "../simd.h"
#include "../model_limits.h"
#include "recurrent/recurrent.h"
#include <string.h>

typedef struct {
    const char *rows;  /* the inputs of the step's rows: [T] rows of `stride` bytes, which begin with `bytes` bytes of inputs */
    long stride, bytes;
    char *tails;       /* [slots, taps - 1] rows of `bytes` bytes: the last inputs */
    const float *conv; /* [taps, width] */
    long taps, width;
    const RecurrentStep *step;
} Convolution;

INLINE long rows_of(const RecurrentStep *s) { return s->query_start_loc[s->seqs]; }

/* Returns the sequence of a row. */
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

/* Returns the input `back` rows before a row, or NULL if it is zero. */
INLINE const char *input_before(const Convolution *c, long seq, long row, long back) {
    long at = row - c->step->query_start_loc[seq] - back, slot = c->step->read_slots[seq];
    if (at >= 0) return c->rows + (row - back) * c->stride;
    return slot < 0 ? NULL : c->tails + (slot * (c->taps - 1) + c->taps - 1 + at) * c->bytes;
}

/* Finds the inputs that a row is convolved from, the oldest first. */
INLINE void find_inputs(const Convolution *c, long row, const char *inputs[MAX_TAPS]) {
    long seq = sequence_of(c, row);
    for (long tap = 0; tap < c->taps; tap++) inputs[tap] = input_before(c, seq, row, c->taps - 1 - tap);
}

/* Returns the sums of the channels [i, i + SIMD_WIDTH). fused: whether products are added without rounding them. */
INLINE vf convolved(const Convolution *c, const char *const inputs[MAX_TAPS], long i, int is_bf16, int fused) {
    vf sum = {0};
    for (long tap = 0; tap < c->taps; tap++) {
        if (!inputs[tap]) continue;
        vf weight = load(c->conv + tap * c->width, i, c->width, 0), x = load(inputs[tap], i, c->width, is_bf16);
        sum = fused ? simd_fma(weight, x, sum) : sum + rounded_product(weight, x);
    }
    return sum;
}

/* Keeps the last inputs of a sequence. The two slots may be the same. */
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
