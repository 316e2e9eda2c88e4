/* Asking for keys and values while others are worked on, spread over the heads or tiles of a block. */
#pragma once
#include "attention/attention.h"

/* Keys and values of the item's heads at positions [from, to), for later. */
INLINE void ask_for_keys(const AttentionArgs *a, const Item *item, long from, long to) {
    long bytes = a->d * a->element, row = a->kv_heads * bytes;
    for (long run; from < to; from += run) {
        size_t at = slot_of(a, item->seq, from, &run) * row + item->head * bytes;
        run = least(run, to - from);
        for (long i = 0; i < run; i++, at += row)
            for (long j = 0; j < item->heads * bytes; j += 64) {
                __builtin_prefetch(a->cache_k + at + j, 0, 2);
                __builtin_prefetch(a->cache_v + at + j, 0, 2);
            }
    }
}

/* Part `part` of `parts` of what is read after this block: the item's next one, or the first of what comes then. */
static void ask_for_part(const AttentionArgs *a, const Scratch *s, const Item *item, long block, long part, long parts) {
    long next = block + KEYS;
    if (next >= least(last_key(a, item), (item->span + item->spans) * SPAN)) {
        item = s->then;
        if (!item) return;
        next = first_block(a, item, item->span);
    }
    ask_for_keys(a, item, next + part * KEYS / parts, least(next + (part + 1) * KEYS / parts, last_key(a, item)));
}
