/* What recurrent layers are called with. worker/kernels/cpu/recurrent_c.py has the same fields, in the same order. */
#pragma once
#include <stdint.h>

typedef struct {
    int threads;
    long seqs;
    const char *projected, *gates; /* [T, ...]: what the layer's input is projected to; not every layer has gates */
    const int32_t *read_slots, *write_slots, *query_start_loc; /* a slot to read below 0: the sequence begins */
    float *scratch; /* [T, floats], as many floats as the layer needs for a row */
    char *out;      /* [T, width of the output] */
} RecurrentStep;

/* What all layers have whose states are matrices [keys, columns], one for each head (state_columns.h). */
typedef struct {
    const float *conv;            /* [taps, channels] */
    const float *decay, *dt_bias; /* [heads] */
    const char *norm;
    char *tails;                  /* [slots, taps - 1, channels]: the last inputs of the convolution */
    float *memories;              /* [slots, heads, blocks, keys, COLUMNS] */
    long heads, keys, columns, taps, channels;
    long first, width; /* of a row of `projected`: where the inputs of the convolution begin, and its width */
    float eps;
} MatrixLayer;
