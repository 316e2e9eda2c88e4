/* The arguments of recurrent layers. worker/kernels/cpu/recurrent/recurrent_c.py has the same fields, in the same order. */
#pragma once
#include <stdint.h>

typedef struct {
    int threads;
    long seqs;
    const char *projected, *gates; /* [T, ...]: projections of the layer's input; not every layer has gates */
    const int32_t *read_slots, *write_slots, *query_start_loc; /* a slot to read below 0: the sequence begins */
    float *scratch; /* [T, floats], as many floats as the layer needs for a row */
    char *out;      /* [T, width of the output] */
} RecurrentStep;

/* A layer whose states are matrices [keys, columns], one for each head (state_columns.h). */
typedef struct {
    const float *conv;            /* [taps, channels] */
    const float *decay, *dt_bias; /* [heads] */
    const char *norm;
    char *tails;                  /* [slots, taps - 1, channels]: the last inputs of the convolution */
    float *memories;              /* [slots, heads, blocks, keys, COLUMNS] */
    long heads, keys, columns, taps, channels;
    long first, width; /* in a row of `projected`: first input of the convolution, and width of the row */
    float eps;
} MatrixLayer;
