/* Activations, gated products, scales of rows, and gates of outputs. */
#include "rows.h"
#include <stddef.h>

/* The activations, in the order of ACTIVATIONS in worker/ops/activation/reference.py. */
enum { SILU, GELU_TANH, RELU2, CLAMPED_SWIGLU, XIELU, GELU };

/* tanh-GELU is x * sigmoid(2u), since (1 + tanh u) / 2 = sigmoid(2u). xIELU has parameters (worker/spec.py). */
INLINE vf activated(vf x, int activation, const float *parameters) {
    vf zero = {0};
    if (activation == SILU) return x * sigmoid(x);
    if (activation == GELU_TANH) return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    if (activation == GELU) return 0.5f * x * (1.0f + simd_erf(0.70710678f * x));
    vf positive = simd_select(x < 0.0f, zero, x); /* keeps a NaN */
    if (activation == RELU2) return positive * positive;
    float alpha_p = parameters[0], alpha_n = parameters[1], beta = parameters[2], eps = parameters[3];
    vf negative = (simd_expm1(simd_min(broadcast(eps), x)) - x) * alpha_n;
    return simd_select(x > 0.0f, alpha_p * x * x, negative) + beta * x;
}

INLINE void activate_row(const void *x, void *out, long n, int activation, const float *parameters, int is_bf16) {
    for (long i = 0; i < n; i += SIMD_WIDTH)
        store(out, i, n, activated(load(x, i, n, is_bf16), activation, parameters), is_bf16);
}

/* Returns act(gate) * up; act(gate) is rounded before the product. */
INLINE vf gated(vf gate, vf up, int activation, int is_bf16) {
    if (activation != CLAMPED_SWIGLU) return rounded(activated(gate, activation, NULL), is_bf16) * up;
    vf limit = broadcast(7.0f); /* simd_min and simd_max return their second argument if it is NaN */
    gate = simd_min(limit, gate), up = simd_max(-limit, simd_min(limit, up));
    return rounded(gate * sigmoid(1.702f * gate), is_bf16) * (up + 1.0f);
}

INLINE void act_and_mul_row(const void *gate, const void *up, void *out, long n, int activation, int is_bf16) {
    for (long i = 0; i < n; i += SIMD_WIDTH)
        store(out, i, n, gated(load(gate, i, n, is_bf16), load(up, i, n, is_bf16), activation, is_bf16), is_bf16);
}

#define ACTIVATIONS(dtype, is_bf16)                                                                                   \
    /* Strides are in elements. */                                                                                    \
    EXPORT(act_and_mul_##dtype)(const char *gate, const char *up, char *out, long t, long n, long gate_stride,        \
                                long up_stride, int activation, int threads) {                                        \
        size_t step = n * element_size(is_bf16), next_gate = gate_stride * element_size(is_bf16);                     \
        size_t next_up = up_stride * element_size(is_bf16);                                                           \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                 \
        for (long i = 0; i < t; i++)                                                                                  \
            if (activation == SILU)                                                                                   \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, SILU, is_bf16);            \
            else if (activation == GELU_TANH)                                                                         \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, GELU_TANH, is_bf16);       \
            else if (activation == GELU)                                                                              \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, GELU, is_bf16);            \
            else if (activation == RELU2)                                                                             \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, RELU2, is_bf16);           \
            else                                                                                                      \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, CLAMPED_SWIGLU, is_bf16);  \
    }                                                                                                                 \
    /* out may be x. */                                                                                               \
    EXPORT(activate_##dtype)(const char *x, char *out, const float *parameters, long t, long n, int activation,       \
                             int threads) {                                                                           \
        size_t step = n * element_size(is_bf16);                                                                      \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                 \
        for (long i = 0; i < t; i++)                                                                                  \
            if (activation == SILU)                                                                                   \
                activate_row(x + i * step, out + i * step, n, SILU, NULL, is_bf16);                                   \
            else if (activation == GELU_TANH)                                                                         \
                activate_row(x + i * step, out + i * step, n, GELU_TANH, NULL, is_bf16);                              \
            else if (activation == GELU)                                                                              \
                activate_row(x + i * step, out + i * step, n, GELU, NULL, is_bf16);                                   \
            else if (activation == RELU2)                                                                             \
                activate_row(x + i * step, out + i * step, n, RELU2, NULL, is_bf16);                                  \
            else                                                                                                      \
                activate_row(x + i * step, out + i * step, n, XIELU, parameters, is_bf16);                            \
    }                                                                                                                 \
    /* Multiplies each row in place by its position's factor or, if positions is NULL, by scales[0]. */               \
    EXPORT(scale_rows_##dtype)(char *x, const float *scales, const int64_t *positions, long t, long n, int threads) { \
        size_t step = n * element_size(is_bf16);                                                                      \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                 \
        for (long i = 0; i < t; i++)                                                                                  \
            for (long j = 0; j < n; j += SIMD_WIDTH) {                                                                \
                vf scale = broadcast(scales[positions ? positions[i] : 0]);                                           \
                vf scaled = load(x + i * step, j, n, is_bf16) * scale;                                                \
                store(x + i * step, j, n, scaled, is_bf16);                                                           \
            }                                                                                                         \
    }                                                                                                                 \
    /* Multiplies each element by the rounded sigmoid of its gate. out may be x. */                                   \
    EXPORT(output_gate_##dtype)(const char *x, const char *gate, char *out, long t, long n, int threads) {            \
        size_t step = n * element_size(is_bf16);                                                                      \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                 \
        for (long i = 0; i < t; i++)                                                                                  \
            for (long j = 0; j < n; j += SIMD_WIDTH) {                                                                \
                vf open = rounded(sigmoid(load(gate + i * step, j, n, is_bf16)), is_bf16);                            \
                store(out + i * step, j, n, load(x + i * step, j, n, is_bf16) * open, is_bf16);                       \
            }                                                                                                         \
    }

ACTIVATIONS(f32, 0)
ACTIVATIONS(bf16, 1)
