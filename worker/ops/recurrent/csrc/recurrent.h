/* The arguments of recurrent layers. The structures in worker/ops/recurrent/native.py have the same
 * fields, in the same order. */
#pragma once
#include <stdint.h>

typedef struct {
    int threads;
    long seqs;
    const char *projected, *gates; /* [T, ...]: projections of the layer's input; some layers have no gates */
    const int32_t *read_slots, *write_slots, *query_start_loc; /* read slot < 0: a new sequence, whose state is zero */
    float *scratch; /* [T, n]: n is the number of floats that the layer needs for a row */
    char *out;      /* [T, width of the output] */
} RecurrentStep;

/* A layer whose state is a matrix [keys, columns] for each sequence and head (state_columns.h). */
typedef struct {
    const float *conv;            /* [taps, channels] */
    const float *decay, *dt_bias; /* [heads] */
    const char *norm;
    char *tails;                  /* [slots, taps - 1, channels]: the last inputs of the convolution */
    float *memories;              /* [slots, heads, blocks, keys, COLUMNS]: the states */
    long heads, keys, columns, taps, channels;
    long first, width; /* width: elements of a row of `projected`; first: index of the convolution's first input in this
                          row */
    float eps;
} MatrixLayer;
