/* Functions of kernels whose outputs are rows: SoftmaxState.out is [16 rows][D padded to OUT_STEP]. */
#pragma once
#define TILE_ROWS 16
/* Neighbouring heads are read together even when sequences are few, as long as every thread gets several items. */
#define MIN_ITEM_HEADS max_long(1, min_long(a->kv_heads * count_splits(a) / (4 * threads), MAX_ITEM_TILES / tiles))
#include "attention/attention.h"

INLINE vf state_exp(vf x); /* the exponential in whose unit SoftmaxState.max is */

NOINLINE void merge_split(const AttentionArgs *a, SoftmaxState *total, const SoftmaxState *split) {
    float total_factors[16], split_factors[16];
    for (int i = 0; i < 16; i += SIMD_WIDTH) {
        vf old = load_f32(total->max + i), new = load_f32(split->max + i), max = simd_max(old, new);
        vf total_factor = state_exp(old - max), split_factor = state_exp(new - max);
        store_f32(total->max + i, max);
        store_f32(total->sum + i, load_f32(total->sum + i) * total_factor + load_f32(split->sum + i) * split_factor);
        store_f32(total_factors + i, total_factor);
        store_f32(split_factors + i, split_factor);
    }
    for (long row = 0, stride = out_stride(a); row < 16; row++)
        for (long i = row * stride; i < (row + 1) * stride; i += SIMD_WIDTH)
            store_f32(total->out + i, load_f32(total->out + i) * total_factors[row] +
                                          load_f32(split->out + i) * split_factors[row]);
}
