/* A call of the short convolution (short_conv.c). worker/kernels/cpu/short_conv.py has the same fields, in the same
 * order. */
#pragma once
#include <stdint.h>

typedef struct {
    const float *conv; /* [taps, channels] */
    char *tails;       /* [slots, taps - 1, channels]: the last inputs */
    long channels, taps;

    /* From here on, of a step. */
    int threads;
    long seqs;
    const char *projected; /* [T, 3, channels]: b, c, x */
    const int32_t *read_slots, *write_slots, *query_start_loc;
    char *inputs; /* [T, channels]: scratch */
    char *out;    /* [T, channels] */
} ShortConv;
