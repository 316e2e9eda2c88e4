/* The experts of a layer, and the kernels that compute them (experts.c). */
#pragma once
#include "gemm/weight.h"
#include "ranks/ranks.h"

typedef int Gemm(const GemmJob *jobs, long count, int out_bf16, int threads);
typedef void ActAndMul(const char *gate, const char *up, char *out, long t, long n, long gate_stride, long up_stride,
                       int activation, int threads);
typedef void Combine(const float *results, const int32_t *places, const float *weights, const char *add,
                     const float *add_gate, char *out, long t, long chosen, long n, int threads);

/* For rows of one dtype: is_bf16, or else fp32. */
typedef struct {
    Gemm *gemm;
    ActAndMul *act_and_mul;
    Combine *combine;
    int is_bf16;
} ExpertKernels;

typedef struct {
    const Weight *router, *gate_up, *down; /* gate_up, down: [count], by expert */
    const float *scales;                   /* [count] or NULL: factors of the experts' weights */
    const float *choice_bias;              /* [count] or NULL: added to the sigmoids for the choice alone */
    int64_t *loads;                        /* [count] or NULL: the rows that chose each expert are added */
    Ranks *ranks; /* which have the other columns of gate_up and down; NULL: this process has all of them */
    long count, chosen;
    int sigmoid, normalized, activation;   /* sigmoid: scores are sigmoids of the logits, else their softmax */
} Experts;

/* Returns the bytes that `experts_forward` needs for t rows. */
long experts_scratch(const Experts *e, int is_bf16, long t);

/* Computes out [t, H] from h [t, H]: see experts() in worker/kernels/experts.py. router_input [t, H], add [t, H] and
 * add_gate [t] may be NULL, and `out` may be h or `add`. Returns 0, or 1 when memory is exhausted. */
int experts_forward(const Experts *e, const ExpertKernels *kernels, const char *router_input, const char *h,
                    const char *add, const float *add_gate, char *out, long t, char *scratch, int threads);

/* Writes what experts_forward computes from logits [t, count]: the experts of each row [t, chosen] from the most to the
 * least likely, and their weights. */
void experts_choose(const Experts *e, const float *logits, long t, int32_t *numbers, float *weights);
