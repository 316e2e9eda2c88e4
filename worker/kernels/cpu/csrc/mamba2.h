/* A call of Mamba-2 (mamba2.c). worker/kernels/cpu/mamba2.py has the same fields, in the same order. */
#pragma once
#include <stdint.h>

typedef struct {
    const float *conv, *conv_bias;        /* [taps, channels], [channels] */
    const float *decay, *dt_bias, *skip;  /* [heads] */
    const char *norm;                     /* [heads * head_dim] */
    char *tails;                          /* [slots, taps - 1, channels]: the last inputs of the convolution */
    float *memories;                      /* [slots, heads, blocks, state_size, COLUMNS] */
    long heads, head_dim, groups, state_size, taps;
    float eps;

    /* From here on, of a step. */
    int threads;
    long seqs;
    const char *projected; /* [T, heads * head_dim + channels]: output gates; x, b, c */
    const char *steps;     /* [T, heads]: dt */
    const int32_t *read_slots, *write_slots, *query_start_loc;
    float *mixed;          /* [T, channels]: after the convolution; results replace x */
    float *rates;          /* [T, 2, heads]: decay and dt */
    char *out;             /* [T, heads * head_dim] */
} Mamba2;
