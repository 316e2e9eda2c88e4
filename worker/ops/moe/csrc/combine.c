/* The sum over the results of a row's experts. */
#include "rows.h"

/* Computes `add` [n] times the sigmoid of `gate`, plus the sum over a row's slots of weights * results [][n]. */
INLINE void combine_row(const float *results, const int32_t *places, const float *weights, long chosen, const void *add,
                        const float *gate, void *out, long n, int is_bf16) {
    vf share = gate ? sigmoid(broadcast(*gate)) : broadcast(1);
    for (long i = 0; i < n; i += SIMD_WIDTH) {
        vf sum = add ? load(add, i, n, is_bf16) * share : broadcast(0);
        for (long s = 0; s < chosen; s++)
            sum = simd_fma(broadcast(weights[s]), load(results + places[s] * n, i, n, 0), sum);
        store(out, i, n, sum, is_bf16);
    }
}

#define COMBINE(dtype, is_bf16)                                                                                  \
    EXPORT(combine_##dtype)(const float *results, const int32_t *places, const float *weights, const char *add,  \
                            const float *add_gate, char *out, long t, long chosen, long n, int threads) {        \
        size_t step = n * element_size(is_bf16);                                                                 \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n * chosen >= MIN_PARALLEL_ELEMENTS)")   \
        for (long i = 0; i < t; i++)                                                                             \
            combine_row(results, places + i * chosen, weights + i * chosen, chosen, add ? add + i * step : NULL, \
                        add_gate ? add_gate + i : NULL, out + i * step, n, is_bf16);                             \
    }

COMBINE(f32, 0)
COMBINE(bf16, 1)
