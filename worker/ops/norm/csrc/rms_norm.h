/* The RMS norm of one row. */
#pragma once
#include "rows.h"
#include <math.h>

INLINE float inverse_rms(const void *x, long n, float eps, int is_bf16) {
    vf a = {0}, b = {0}, c = {0}, d = {0};
    long i = 0;
    for (; i + 4 * SIMD_WIDTH <= n; i += 4 * SIMD_WIDTH) {
        vf w = load(x, i, n, is_bf16), y = load(x, i + SIMD_WIDTH, n, is_bf16);
        vf z = load(x, i + 2 * SIMD_WIDTH, n, is_bf16), u = load(x, i + 3 * SIMD_WIDTH, n, is_bf16);
        a += w * w, b += y * y, c += z * z, d += u * u;
    }
    for (; i < n; i += SIMD_WIDTH) {
        vf w = load(x, i, n, is_bf16);
        a += w * w;
    }
    return 1.0f / sqrtf(simd_sum((a + b) + (c + d)) / (float)n + eps);
}

/* Computes the RMS norm of one row. With offset 0 (Llama): weight * round(x / rms). With another offset (Gemma):
 * (x / rms) * (offset + weight), rounded once. */
INLINE void rms_norm_row(const void *x, const void *w, void *out, long n, float eps, float offset, int is_bf16) {
    vf scale = broadcast(inverse_rms(x, n, eps, is_bf16));
    for (long i = 0; i < n; i += SIMD_WIDTH) {
        vf weight = load(w, i, n, is_bf16), normed = load(x, i, n, is_bf16) * scale;
        vf y = offset == 0 ? weight * rounded(normed, is_bf16) : normed * (weight + offset);
        store(out, i, n, y, is_bf16);
    }
}

#define RMS_NORM_ONE(dtype, is_bf16)                                                                               \
    NOINLINE void rms_norm_one_##dtype(const void *x, const void *w, void *out, long n, float eps, float offset) { \
        rms_norm_row(x, w, out, n, eps, offset, is_bf16);                                                          \
    }

RMS_NORM_ONE(f32, 0)
RMS_NORM_ONE(bf16, 1)
