/* Functions for the kernels that keep outputs by row: SoftmaxState.out is [16 rows][D padded to OUT_STEP]. */
#pragma once
#define TILE_ROWS 16
/* Even with few sequences, a work item has several neighbouring heads, as long as every thread gets several items. */
#define MIN_ITEM_HEADS max_long(1, min_long(a->kv_heads * count_splits(a) / (4 * threads), MAX_ITEM_TILES / tiles))
#include "attention.h"

INLINE vf state_exp(vf x);      /* the kernel's exponential: e^x, or 2^x in kernels that keep logits times log2(e) */
INLINE vf to_state(vf logits); /* converts logits to the unit of SoftmaxState.max, in which state_exp expects its
                                  argument */

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

/* Adds the weights of the sinks to the sums of a tile's rows. Outputs do not change, because a sink's value is zero.
 *
 * The weight of a sink is e^(its logit - the maximum of the row's scores), so the row's sum stays at least 1, and a
 * sink of -inf adds exactly 0. A sink far above the maximum makes the sum so large that the output becomes zero. */
NOINLINE void add_sinks(const AttentionArgs *a, const Tile *tile, SoftmaxState *state) {
    float logits[16];
    long group = group_size(a);
    for (int i = 0; i < 16; i++)
        logits[i] = a->sinks[tile->head * group + (tile->row + min_long(i, tile->rows - 1)) % group];
    for (int i = 0; i < 16; i += SIMD_WIDTH) {
        vf sink = simd_max(broadcast(MASKED_SCORE), to_state(load_f32(logits + i)));
        store_f32(state->sum + i, load_f32(state->sum + i) + state_exp(sink - load_f32(state->max + i)));
    }
}
