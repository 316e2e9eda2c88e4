/* RMS norm and layer norm, alone or after adding the residual. */
#include "rms_norm.h"
#include <string.h>

/* Returns x - mean for the elements [i, i + SIMD_WIDTH) of a row of n elements, with zeros beyond n. */
INLINE vf centred(const void *x, long i, long n, vf mean, int is_bf16) {
    vf difference = load(x, i, n, is_bf16) - mean;
    if (i + SIMD_WIDTH <= n) return difference;
    float kept[SIMD_WIDTH];
    store_f32(kept, difference);
    return load(kept, 0, n - i, 0);
}

/* Computes the layer norm of one row: (x - mean) / sqrt(variance + eps) * weight + bias, rounded once. w: weight [n],
 * followed by bias [n]. */
INLINE void layer_norm_row(const void *x, const void *w, void *out, long n, float eps, int is_bf16) {
    vf sum = {0}, squares = {0};
    for (long i = 0; i < n; i += SIMD_WIDTH) sum += load(x, i, n, is_bf16);
    vf mean = broadcast(simd_sum(sum) / (float)n);
    for (long i = 0; i < n; i += SIMD_WIDTH) {
        vf difference = centred(x, i, n, mean, is_bf16);
        squares += difference * difference;
    }
    vf scale = broadcast(1.0f / sqrtf(simd_sum(squares) / (float)n + eps));
    const char *bias = (const char *)w + n * element_size(is_bf16);
    for (long i = 0; i < n; i += SIMD_WIDTH) {
        vf normed = (load(x, i, n, is_bf16) - mean) * scale;
        store(out, i, n, normed * load(w, i, n, is_bf16) + load(bias, i, n, is_bf16), is_bf16);
    }
}

/* Sets out to scale * x + y. */
INLINE void add_row(const void *x, const void *y, void *out, long n, float scale, int is_bf16) {
    for (long i = 0; i < n; i += SIMD_WIDTH)
        store(out, i, n, simd_fma(load(x, i, n, is_bf16), broadcast(scale), load(y, i, n, is_bf16)), is_bf16);
}

/* Defines two kernels for one kind of norm: the norm alone, and the norm after adding the residual. */
#define NORM(kind, dtype, is_bf16)                                                                                     \
    EXPORT(kind##_##dtype)(const char *x, const void *w, char *out, long t, long heads, long n, long stride,           \
                           float eps, float offset, int threads) {                                                     \
        size_t step = n * element_size(is_bf16);                                                                       \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * heads * n >= MIN_PARALLEL_ELEMENTS)")          \
        for (long i = 0; i < t; i++)                                                                                   \
            for (long h = 0; h < heads; h++)                                                                           \
                kind##_one_##dtype(x + i * stride * element_size(is_bf16) + h * step, w, out + (i * heads + h) * step, \
                    n, eps, offset);                                                                                   \
    }                                                                                                                  \
    EXPORT(add_##kind##_##dtype)(const char *x, const char *residual, const void *w, char *out, char *sum, long t,     \
                                 long n, float eps, float offset, float scale, int threads) {                          \
        size_t step = n * element_size(is_bf16);                                                                       \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                  \
        for (long i = 0; i < t; i++) {                                                                                 \
            add_row(x + i * step, residual + i * step, sum + i * step, n, scale, is_bf16);                             \
            if (w)                                                                                                     \
                kind##_one_##dtype(sum + i * step, w, out + i * step, n, eps, offset);                                 \
            else                                                                                                       \
                memcpy(out + i * step, sum + i * step, step);                                                          \
        }                                                                                                              \
    }

#define NORMS(dtype, is_bf16)                                                                                        \
    NOINLINE void layer_norm_one_##dtype(const void *x, const void *w, void *out, long n, float eps, float offset) { \
        layer_norm_row(x, w, out, n, eps, is_bf16); /* takes no offset */                                            \
    }                                                                                                                \
    NORM(rms_norm, dtype, is_bf16)                                                                                   \
    NORM(layer_norm, dtype, is_bf16)

NORMS(f32, 0)
NORMS(bf16, 1)
