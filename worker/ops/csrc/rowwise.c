/* Row-wise kernels: RMS norm, layer norm, activate, act_and_mul, output_gate, the sum over a row's experts, rotary
 * embedding, the K/V write, and qkv_rope_write, which fuses norm, rotation and K/V write.
 *
 * Each kernel calls one function per row, so a row has the same bits in every batch, with every chunking of the prompt
 * and any number of threads. This file does not deal with packed weights or pages. */
#include "quantize_kv.h"
#include <math.h>

#define MIN_PARALLEL_ELEMENTS 16384 /* with fewer elements, a second thread costs more than it saves */

INLINE size_t element_size(int is_bf16) { return is_bf16 ? 2 : 4; }

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

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + simd_exp(-x)); }

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

/* Rotates one head: x * cos + rotate_half(x) * sin in fp32, rounded once. `out` may be x. */
INLINE void rotary_row(const void *x, void *out, const float *cos, const float *sin, long d, int is_bf16) {
    long h = d / 2;
    const char *high = (const char *)x + h * element_size(is_bf16);
    char *high_out = (char *)out + h * element_size(is_bf16);
    for (long i = 0; i < h; i += SIMD_WIDTH) {
        vf a = load(x, i, h, is_bf16), b = load(high, i, h, is_bf16);
        /* rounds one product explicitly, because compilers choose differently which product they fuse with the sum */
        vf low = simd_fma(a, load(cos, i, h, 0), -rounded_product(b, load(sin, i, h, 0)));
        vf top = simd_fma(b, load(cos + h, i, h, 0), rounded_product(a, load(sin + h, i, h, 0)));
        store(out, i, h, low, is_bf16);
        store(high_out, i, h, top, is_bf16);
    }
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

#define ROW_FUNCTIONS(dtype, is_bf16)                                                                                    \
    NOINLINE void rms_norm_one_##dtype(const void *x, const void *w, void *out, long n, float eps, float offset) {       \
        rms_norm_row(x, w, out, n, eps, offset, is_bf16);                                                                \
    }                                                                                                                    \
    NOINLINE void layer_norm_one_##dtype(const void *x, const void *w, void *out, long n, float eps, float offset) {     \
        layer_norm_row(x, w, out, n, eps, is_bf16); /* takes no offset */                                                \
    }                                                                                                                    \
    NOINLINE void rotary_one_##dtype(const void *x, void *out, const float *cos, const float *sin, long d) {             \
        rotary_row(x, out, cos, sin, d, is_bf16);                                                                        \
    }                                                                                                                    \
    NORM(rms_norm, dtype, is_bf16)                                                                                       \
    NORM(layer_norm, dtype, is_bf16)                                                                                     \
    /* Strides are in elements. */                                                                                       \
    EXPORT(act_and_mul_##dtype)(const char *gate, const char *up, char *out, long t, long n, long gate_stride,           \
                                long up_stride, int activation, int threads) {                                           \
        size_t step = n * element_size(is_bf16), next_gate = gate_stride * element_size(is_bf16);                        \
        size_t next_up = up_stride * element_size(is_bf16);                                                              \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                    \
        for (long i = 0; i < t; i++)                                                                                     \
            if (activation == SILU)                                                                                      \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, SILU, is_bf16);               \
            else if (activation == GELU_TANH)                                                                            \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, GELU_TANH, is_bf16);          \
            else if (activation == GELU)                                                                                 \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, GELU, is_bf16);               \
            else if (activation == RELU2)                                                                                \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, RELU2, is_bf16);              \
            else                                                                                                         \
                act_and_mul_row(gate + i * next_gate, up + i * next_up, out + i * step, n, CLAMPED_SWIGLU, is_bf16);     \
    }                                                                                                                    \
    /* out may be x. */                                                                                                  \
    EXPORT(activate_##dtype)(const char *x, char *out, const float *parameters, long t, long n, int activation,          \
                             int threads) {                                                                              \
        size_t step = n * element_size(is_bf16);                                                                         \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                    \
        for (long i = 0; i < t; i++)                                                                                     \
            if (activation == SILU)                                                                                      \
                activate_row(x + i * step, out + i * step, n, SILU, NULL, is_bf16);                                      \
            else if (activation == GELU_TANH)                                                                            \
                activate_row(x + i * step, out + i * step, n, GELU_TANH, NULL, is_bf16);                                 \
            else if (activation == GELU)                                                                                 \
                activate_row(x + i * step, out + i * step, n, GELU, NULL, is_bf16);                                      \
            else if (activation == RELU2)                                                                                \
                activate_row(x + i * step, out + i * step, n, RELU2, NULL, is_bf16);                                     \
            else                                                                                                         \
                activate_row(x + i * step, out + i * step, n, XIELU, parameters, is_bf16);                               \
    }                                                                                                                    \
    /* Multiplies each row in place by its position's factor or, if positions is NULL, by scales[0]. */                  \
    EXPORT(scale_rows_##dtype)(char *x, const float *scales, const int64_t *positions, long t, long n, int threads) {    \
        size_t step = n * element_size(is_bf16);                                                                         \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                    \
        for (long i = 0; i < t; i++)                                                                                     \
            for (long j = 0; j < n; j += SIMD_WIDTH) {                                                                   \
                vf scale = broadcast(scales[positions ? positions[i] : 0]);                                              \
                vf scaled = load(x + i * step, j, n, is_bf16) * scale;                                                   \
                store(x + i * step, j, n, scaled, is_bf16);                                                              \
            }                                                                                                            \
    }                                                                                                                    \
    /* Multiplies each element by the rounded sigmoid of its gate. out may be x. */                                      \
    EXPORT(output_gate_##dtype)(const char *x, const char *gate, char *out, long t, long n, int threads) {               \
        size_t step = n * element_size(is_bf16);                                                                         \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n >= MIN_PARALLEL_ELEMENTS)")                    \
        for (long i = 0; i < t; i++)                                                                                     \
            for (long j = 0; j < n; j += SIMD_WIDTH) {                                                                   \
                vf open = rounded(sigmoid(load(gate + i * step, j, n, is_bf16)), is_bf16);                               \
                store(out + i * step, j, n, load(x + i * step, j, n, is_bf16) * open, is_bf16);                          \
            }                                                                                                            \
    }                                                                                                                    \
    EXPORT(combine_##dtype)(const float *results, const int32_t *places, const float *weights, const char *add,          \
                            const float *add_gate, char *out, long t, long chosen, long n, int threads) {                \
        size_t step = n * element_size(is_bf16);                                                                         \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * n * chosen >= MIN_PARALLEL_ELEMENTS)")           \
        for (long i = 0; i < t; i++)                                                                                     \
            combine_row(results, places + i * chosen, weights + i * chosen, chosen, add ? add + i * step : NULL,         \
                        add_gate ? add_gate + i : NULL, out + i * step, n, is_bf16);                                     \
    }                                                                                                                    \
    EXPORT(rotary_##dtype)(const char *x, char *out, const float *cos, const float *sin, const int64_t *positions,       \
                           long t, long heads, long d, long stride, int threads) {                                       \
        size_t step = d * element_size(is_bf16);                                                                         \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * heads * d >= MIN_PARALLEL_ELEMENTS)")            \
        for (long i = 0; i < t; i++)                                                                                     \
            for (long h = 0; h < heads; h++)                                                                             \
                rotary_one_##dtype(x + i * stride * element_size(is_bf16) + h * step, out + (i * heads + h) * step,      \
                    cos + positions[i] * d, sin + positions[i] * d, d);                                                  \
    }

ROW_FUNCTIONS(f32, 0)
ROW_FUNCTIONS(bf16, 1)

#define STORE_TOKEN(dtype, is_bf16)                                                                                              \
    NOINLINE void quantize_one_##dtype(const void *x, char *row, long d, int kv_format) {                                        \
        if (kv_format == KV_INT8)                                                                                                \
            quantize_row(x, row, d, is_bf16, KV_INT8);                                                                           \
        else                                                                                                                     \
            quantize_row(x, row, d, is_bf16, KV_FP8);                                                                            \
    }                                                                                                                            \
    /* Stores one token's keys or values, of all heads, in a slot of the cache. */                                               \
    NOINLINE void store_token_##dtype(const char *x, char *cache, int64_t slot, long heads, long d, int kv_format,               \
                                      int is_value) {                                                                            \
        size_t step = d * element_size(is_bf16), row = kv_row_bytes(kv_format, d, element_size(is_bf16));                        \
        if (kv_format == KV_PAIRED && is_value)                                                                                  \
            store_alternating_values(x, cache, slot, heads * row);                                                               \
        else if (in_eight_bits(kv_format))                                                                                       \
            for (long h = 0; h < heads; h++) quantize_one_##dtype(x + h * step, cache + (slot * heads + h) * row, d, kv_format); \
        else                                                                                                                     \
            memcpy(cache + slot * heads * row, x, heads * row);                                                                  \
    }

STORE_TOKEN(f32, 0)
STORE_TOKEN(bf16, 1)

/* What the norm of queries or keys covers. HEADS: each head, before the rotary embedding. ROTATED_HEADS: each head,
 * after the rotary embedding. WHOLE: all heads together, before the rotary embedding, with a weight for each
 * element. */
enum { HEADS, WHOLE, ROTATED_HEADS };

/* Parameters that are the same for all heads of a step. */
typedef struct {
    const float *cos, *sin;
    float eps, offset;
    long d;
    int normed;
} HeadParams;

typedef void RmsNormOne(const void *, const void *, void *, long, float, float);
typedef void RotaryOne(const void *, void *, const float *, const float *, long);

/* Applies the norm (if `norm` is not NULL) and the rotary embedding to the query heads or the key heads of a token. */
INLINE void norm_and_rotate(const HeadParams *p, const char *x, char *out, long heads, const void *norm,
                            int64_t position, RmsNormOne *rms_norm_one, RotaryOne *rotary_one, size_t step) {
    if (norm && p->normed == WHOLE) {
        rms_norm_one(x, norm, out, heads * p->d, p->eps, p->offset);
        x = out;
    }
    for (long h = 0; h < heads; h++, x += step, out += step) {
        int first = norm && p->normed == HEADS;
        if (first) rms_norm_one(x, norm, out, p->d, p->eps, p->offset);
        rotary_one(first ? out : x, out, p->cos + position * p->d, p->sin + position * p->d, p->d);
        if (norm && p->normed == ROTATED_HEADS) rms_norm_one(out, norm, out, p->d, p->eps, p->offset);
    }
}

/* Computes the steps between the qkv matmul and attention: norms, rotary embedding, K/V write. Norms may be NULL. */
#define QKV_ROPE_WRITE(dtype, is_bf16)                                                                                             \
    EXPORT(qkv_rope_write_##dtype)(const char *qkv, char *q, char *cache_k, char *cache_v, const void *q_norm,                     \
                                   const void *k_norm, const void *v_norm, const float *cos, const float *sin,                     \
                                   const int64_t *positions, const int64_t *slot_mapping, float eps, float offset, long t,         \
                                   long q_heads, long kv_heads, long d, int normed, int kv_format, int threads) {                  \
        HeadParams shared = {cos, sin, eps, offset, d, normed};                                                                    \
        size_t step = d * element_size(is_bf16), row = (q_heads + 2 * kv_heads) * step, kv = kv_heads * step;                      \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * (long)row >= MIN_PARALLEL_ELEMENTS)")                      \
        for (long i = 0; i < t; i++) {                                                                                             \
            const char *x = qkv + i * row, *k = x + q_heads * step, *v = k + kv;                                                   \
            norm_and_rotate(&shared, x, q + i * q_heads * step, q_heads, q_norm, positions[i], rms_norm_one_##dtype,               \
                            rotary_one_##dtype, step);                                                                             \
            if (!kv_heads) continue;                                                                                               \
            char heads[kv]; /* the key or value heads of one token */                                                              \
            if (in_eight_bits(kv_format)) {                                                                                        \
                norm_and_rotate(&shared, k, heads, kv_heads, k_norm, positions[i], rms_norm_one_##dtype, rotary_one_##dtype, step);\
                store_token_##dtype(heads, cache_k, slot_mapping[i], kv_heads, d, kv_format, 0);                                   \
            } else                                                                                                                 \
                norm_and_rotate(&shared, k, cache_k + slot_mapping[i] * kv, kv_heads, k_norm, positions[i],                        \
                                rms_norm_one_##dtype, rotary_one_##dtype, step);                                                   \
            for (long h = 0; v_norm && h < kv_heads; h++)                                                                          \
                rms_norm_one_##dtype(v + h * step, v_norm, heads + h * step, d, eps, offset);                                      \
            store_token_##dtype(v_norm ? heads : v, cache_v, slot_mapping[i], kv_heads, d, kv_format, 1);                          \
        }                                                                                                                          \
    }                                                                                                                              \
    /* Writes keys and values to the cache. Strides are in elements. */                                                            \
    EXPORT(store_kv_##dtype)(const char *k, const char *v, char *cache_k, char *cache_v,                                           \
                             const int64_t *slot_mapping, long t, long heads, long d, long k_stride, long v_stride,                \
                             int kv_format) {                                                                                      \
        for (long i = 0; i < t; i++) {                                                                                             \
            const char *key = k + i * k_stride * element_size(is_bf16), *value = v + i * v_stride * element_size(is_bf16);         \
            store_token_##dtype(key, cache_k, slot_mapping[i], heads, d, kv_format, 0);                                            \
            store_token_##dtype(value, cache_v, slot_mapping[i], heads, d, kv_format, 1);                                          \
        }                                                                                                                          \
    }

QKV_ROPE_WRITE(f32, 0)
QKV_ROPE_WRITE(bf16, 1)
