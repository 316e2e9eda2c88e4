/* Adds an adapter's product to one row of a linear's output. */
#include "simd.h"

INLINE void add_product(char *y, const float *product, const float *factors, long n, float scale, int is_bf16) {
    for (long i = 0; i < n; i += SIMD_WIDTH) {
        vf scaled = rounded_product(load(product, i, n, 0), load(factors, i, n, 0));
        store(y, i, n, load(y, i, n, is_bf16) + rounded_product(scaled, broadcast(scale)), is_bf16);
    }
}

#define ADD_PRODUCT(dtype, is_bf16)                                                                               \
    EXPORT(add_product_##dtype)(char *y, const float *product, const float *factors, long n, float scale) {       \
        add_product(y, product, factors, n, scale, is_bf16);                                                      \
    }

ADD_PRODUCT(f32, 0)
ADD_PRODUCT(bf16, 1)
