/* The experts of a layer, and the kernels that compute them (experts.c). */
#pragma once
#include "weight.h"
#include "ranks.h"

typedef int Gemm(const GemmJob *jobs, long count, int out_bf16, int threads);
typedef void ActAndMul(const char *gate, const char *up, char *out, long t, long n, long gate_stride, long up_stride,
                       int activation, int threads);
typedef void Activate(const char *x, char *out, const float *parameters, long t, long n, int activation, int threads);
typedef void Combine(const float *results, const int32_t *places, const float *weights, const char *add,
                     const float *add_gate, char *out, long t, long chosen, long n, int threads);

/* The kernels for rows of one dtype: bf16 if is_bf16, else fp32. */
typedef struct {
    Gemm *gemm;
    ActAndMul *act_and_mul;
    Activate *activate;
    Combine *combine;
    int is_bf16;
} ExpertKernels;

typedef struct {
    const Weight *router, *gate_up, *down; /* gate_up and down: arrays of `count` weights, one for each expert. gate_up
                                              has as many outputs as down has inputs if the experts have no gate */
    const float *scales;                   /* [count] or NULL: factors for the routing weights */
    const float *choice_bias;              /* [count] or NULL: added to the scores when experts are chosen, not to the
                                              routing weights */
    int64_t *loads;                        /* [count] or NULL: for each expert, a counter of the rows that chose it */
    Ranks *ranks;       /* processes, each with some columns of gate_up and down; NULL: this process has all columns */
    long count, chosen; /* count: how many experts there are; chosen: how many of them each row chooses */
    long groups, chosen_groups, best_of_group; /* experts are chosen from the chosen_groups groups with the greatest
                                                  scores; a group's score is the sum of the best_of_group (1 or 2)
                                                  greatest scores in it. With 1 of 1 groups, all experts can be chosen */
    int sigmoid, normalized, activation; /* sigmoid: if true, routing weights are sigmoids of the logits, else their
                                            softmax; normalized: if true, a row's routing weights are divided by their
                                            sum */
} Experts;

/* Returns how many bytes of scratch memory `experts_forward` needs for t rows. */
long experts_scratch(const Experts *e, int is_bf16, long t);

/* Computes out [t, H] from h [t, H]: see experts() in worker/ops/moe/packed.py. router_input [t, H], add [t, H] and
 * add_gate [t] may be NULL, and `out` may be h or `add`. Returns 0, or 1 when memory is exhausted or a rank is gone. */
int experts_forward(const Experts *e, const ExpertKernels *kernels, const char *router_input, const char *h,
                    const char *add, const float *add_gate, char *out, long t, char *scratch, int threads);

/* Chooses the experts of each row from the router's logits [t, count]. numbers [t, chosen]: the experts, the most
 * likely first; weights [t, chosen]: their routing weights. */
void experts_choose(const Experts *e, const float *logits, long t, int32_t *numbers, float *weights);
