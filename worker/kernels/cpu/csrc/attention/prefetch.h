/* Functions that prefetch keys and values while the current block is computed, spread over its heads or tiles. */
#pragma once
#include "attention/attention.h"

/* Prefetches keys and values of the item's heads at positions [from, to). */
INLINE void prefetch_keys(const AttentionArgs *a, const WorkItem *item, long from, long to) {
    long bytes = head_bytes(a), row = token_bytes(a);
    for (long contiguous; from < to; from += contiguous) {
        size_t at = cache_slot(a, item->seq, from, &contiguous) * row + item->head * bytes;
        contiguous = min_long(contiguous, to - from);
        for (long i = 0; i < contiguous; i++, at += row)
            for (long j = 0; j < item->heads * bytes; j += 64) {
                __builtin_prefetch(a->cache_k + at + j, 0, 2);
                __builtin_prefetch(a->cache_v + at + j, 0, 2);
            }
    }
}

/* Prefetches part `part` of `parts` of the block that is read next: the item's next block, or the first of the next
 * item. */
static void prefetch_next_part(const AttentionArgs *a, const Scratch *s, const WorkItem *item, long block, long part,
                               long parts) {
    long next = block + BLOCK_KEYS;
    if (next >= min_long(end_key(a, item), (item->split + item->splits) * SPLIT_KEYS)) {
        item = s->next_item;
        if (!item) return;
        next = first_block(a, item, item->split);
    }
    prefetch_keys(a, item, next + part * BLOCK_KEYS / parts,
                  min_long(next + (part + 1) * BLOCK_KEYS / parts, end_key(a, item)));
}
