/* Rotary embedding, the K/V write, and qkv_rope_write, which fuses norm, rotation and K/V write. */
#include "quantize_kv.h"
#include "rms_norm.h"

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

#define ROTARY(dtype, is_bf16)                                                                                      \
    NOINLINE void rotary_one_##dtype(const void *x, void *out, const float *cos, const float *sin, long d) {        \
        rotary_row(x, out, cos, sin, d, is_bf16);                                                                   \
    }                                                                                                               \
    EXPORT(rotary_##dtype)(const char *x, char *out, const float *cos, const float *sin, const int64_t *positions,  \
                           long t, long heads, long d, long stride, int threads) {                                  \
        size_t step = d * element_size(is_bf16);                                                                    \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * heads * d >= MIN_PARALLEL_ELEMENTS)")       \
        for (long i = 0; i < t; i++)                                                                                \
            for (long h = 0; h < heads; h++)                                                                        \
                rotary_one_##dtype(x + i * stride * element_size(is_bf16) + h * step, out + (i * heads + h) * step, \
                    cos + positions[i] * d, sin + positions[i] * d, d);                                             \
    }

ROTARY(f32, 0)
ROTARY(bf16, 1)

#define STORE_TOKEN(dtype, is_bf16)                                                                                \
    NOINLINE void quantize_one_##dtype(const void *x, const float *centre, char *row, long d, int row_format) {    \
        switch (row_format) {                                                                                      \
            case KV_INT4: quantize_to_four_bits(x, row, d, is_bf16); break;                                        \
            case KV_INT8: quantize_row(x, centre, row, d, is_bf16, KV_INT8); break;                                \
            default: quantize_row(x, NULL, row, d, is_bf16, KV_FP8);                                               \
        }                                                                                                          \
    }                                                                                                              \
    /* Stores one token's keys or values, of all heads, in a slot of the cache. centres [heads][d]: what is        \
     * subtracted from them first, only if they become int8; may be NULL */                                        \
    NOINLINE void store_token_##dtype(const char *x, const float *centres, char *cache, int64_t slot, long heads,  \
                                      long d, int kv_format, int is_value) {                                       \
        int row_format = is_value ? kv_format : key_format(kv_format);                                             \
        size_t step = d * element_size(is_bf16), row = kv_row_bytes(row_format, d, element_size(is_bf16));         \
        if (pairs_values(kv_format) && is_value)                                                                   \
            store_alternating_values(x, cache, slot, heads * row);                                                 \
        else if (kv_format == KV_TRANSPOSED)                                                                       \
            store_transposed_keys(x, cache, slot, heads, d);                                                       \
        else if (has_codes(kv_format))                                                                             \
            for (long h = 0; h < heads; h++)                                                                       \
                quantize_one_##dtype(x + h * step, centres ? centres + h * d : NULL,                               \
                                     cache + (slot * heads + h) * row, d, row_format);                             \
        else                                                                                                       \
            memcpy(cache + slot * heads * row, x, heads * row);                                                    \
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

/* Computes the steps between the qkv matmul and attention: norms, rotary embedding, K/V write. Norms may be NULL.
 * k_centre [kv_heads][d]: is subtracted from rotated keys that become int8; may be NULL */
#define QKV_ROPE_WRITE(dtype, is_bf16)                                                                                             \
    EXPORT(qkv_rope_write_##dtype)(const char *qkv, char *q, char *cache_k, char *cache_v, const void *q_norm,                     \
                                   const void *k_norm, const void *v_norm, const float *k_centre, const float *cos, const float *sin, \
                                   const int64_t *positions, const int64_t *slot_mapping, float eps, float offset, long t,         \
                                   long q_heads, long kv_heads, long d, int normed, int kv_format, int threads) {                  \
        HeadParams shared = {cos, sin, eps, offset, d, normed};                                                                    \
        size_t step = d * element_size(is_bf16), kv = kv_heads * step, row = q_heads * step + kv * (cache_v ? 2 : 1);              \
        _Pragma("omp parallel for num_threads(threads) if (t > 1 && t * (long)row >= MIN_PARALLEL_ELEMENTS)")                      \
        for (long i = 0; i < t; i++) {                                                                                             \
            const char *x = qkv + i * row, *k = x + q_heads * step, *v = k + kv;                                                   \
            norm_and_rotate(&shared, x, q + i * q_heads * step, q_heads, q_norm, positions[i], rms_norm_one_##dtype,               \
                            rotary_one_##dtype, step);                                                                             \
            if (!kv_heads) continue;                                                                                               \
            char heads[kv]; /* the key or value heads of one token */                                                              \
            if (has_codes(kv_format) || kv_format == KV_TRANSPOSED) {                                                              \
                norm_and_rotate(&shared, k, heads, kv_heads, k_norm, positions[i], rms_norm_one_##dtype, rotary_one_##dtype, step);\
                store_token_##dtype(heads, k_centre, cache_k, slot_mapping[i], kv_heads, d, kv_format, 0);                         \
            } else                                                                                                                 \
                norm_and_rotate(&shared, k, cache_k + slot_mapping[i] * kv, kv_heads, k_norm, positions[i],                        \
                                rms_norm_one_##dtype, rotary_one_##dtype, step);                                                   \
            if (!cache_v) continue; /* keys are the values, too */                                                                 \
            for (long h = 0; v_norm && h < kv_heads; h++)                                                                          \
                rms_norm_one_##dtype(v + h * step, v_norm, heads + h * step, d, eps, offset);                                      \
            store_token_##dtype(v_norm ? heads : v, NULL, cache_v, slot_mapping[i], kv_heads, d, kv_format, 1);                    \
        }                                                                                                                          \
    }                                                                                                                              \
    /* Writes keys and values to the cache. Strides are in elements. */                                                            \
    EXPORT(store_kv_##dtype)(const char *k, const char *v, const float *k_centre, char *cache_k, char *cache_v,                    \
                             const int64_t *slot_mapping, long t, long heads, long d, long k_stride, long v_stride,                \
                             int kv_format) {                                                                                      \
        for (long i = 0; i < t; i++) {                                                                                             \
            const char *key = k + i * k_stride * element_size(is_bf16), *value = v + i * v_stride * element_size(is_bf16);         \
            store_token_##dtype(key, k_centre, cache_k, slot_mapping[i], heads, d, kv_format, 0);                                  \
            store_token_##dtype(value, NULL, cache_v, slot_mapping[i], heads, d, kv_format, 1);                                    \
        }                                                                                                                          \
    }

QKV_ROPE_WRITE(f32, 0)
QKV_ROPE_WRITE(bf16, 1)
