/* The addresses of a block's keys and values, for kernels that read pages head by head. Also the prefetch of the next
 * block. */
#pragma once
#include "attention.h"

#ifndef PREFETCH_LOCALITY
#define PREFETCH_LOCALITY 3 /* the cache into which the next block is prefetched, as for __builtin_prefetch: 3 is L1 */
#endif

/* The addresses of a block's keys and values at head 0. Entries outside [from, to) point to key `from` and are
 * ignored. */
typedef struct {
    const char *keys[BLOCK_KEYS], *values[BLOCK_KEYS];
    long from, to; /* counted from the block's first key */
} KeyAddresses;

/* One head's scales for the keys and values of a block. They are 0 outside [from, to), where the cache may not have
 * been written. */
typedef struct {
    _Alignas(64) float k[BLOCK_KEYS], v[BLOCK_KEYS];
} Scales;

typedef struct {
    Scratch common;
    KeyAddresses here, next; /* here: the current block; next: the block after it */
    int next_head;           /* the first head to compute in the next block */
    Scales scales;           /* the scales of the current head, if the cache has codes */
} AddressScratch;

INLINE AddressScratch *address_scratch(Scratch *s) { return (AddressScratch *)s; }

static Scratch *thread_scratch(void) {
    static _Thread_local _Alignas(64) AddressScratch scratch;
    return hide_origin(&scratch.common);
}

static void locate_keys(const AttentionArgs *a, KeyAddresses *p, int seq, long block, long from, long to) {
    long k_row = a->kv_heads * key_bytes(a), v_row = a->kv_heads * value_bytes(a);
    for (long at = from, contiguous; at < to; at += contiguous) {
        size_t slot = cache_slot(a, seq, at, &contiguous);
        contiguous = min_long(contiguous, to - at);
        for (long i = 0; i < contiguous; i++) {
            p->keys[at - block + i] = a->cache_k + (slot + i) * k_row;
            p->values[at - block + i] = a->cache_v + (slot + i) * v_row;
        }
    }
    p->from = from - block, p->to = to - block;
    for (long i = 0; i < BLOCK_KEYS; i++)
        if (i < p->from || i >= p->to) p->keys[i] = p->keys[p->from], p->values[i] = p->values[p->from];
}

/* Records only the addresses of keys. The keys themselves are read later, head by head, into the L1 cache. */
static void load_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, long block, long from, long to) {
    AddressScratch *own = address_scratch(s);
    long next = block + BLOCK_KEYS, end = min_long(end_key(a, item), (item->split + item->splits) * SPLIT_KEYS);
    locate_keys(a, &own->here, item->seq, block, from, to);
    if (next >= end && s->next_item) {
        item = s->next_item;
        next = first_block(a, item, item->split), end = end_key(a, item);
    }
    own->next_head = item->head;
    if (next < end)
        locate_keys(a, &own->next, item->seq, next, next, min_long(next + BLOCK_KEYS, end));
    else
        own->next = own->here;
}

/* Returns the current block's scales for a head. Sets them only if the cache has codes. */
static const Scales *head_scales(const AttentionArgs *a, Scratch *s, long head) {
    AddressScratch *own = address_scratch(s);
    const KeyAddresses *p = &own->here;
    long k_row = key_bytes(a), v_row = value_bytes(a);
    float factor = a->kv_format == KV_FP8 ? FP8_FACTOR : 1;
    for (long i = 0; i < BLOCK_KEYS && has_codes(a->kv_format); i++) {
        int there = i >= p->from && i < p->to;
        own->scales.k[i] = there ? row_scale(p->keys[i] + head * k_row, k_row) * factor : 0;
        own->scales.v[i] = there ? row_scale(p->values[i] + head * v_row, v_row) * factor : 0;
    }
    return &own->scales;
}

/* While a head of the current block is computed, a part of the next block is prefetched: all heads of some of its keys.
 * The processor then sees sequential reads at an even pace, and its hardware prefetcher runs further ahead. */
typedef struct {
    const char *at;  /* the next cache line to prefetch */
    long left;       /* how many cache lines of the current keys are not prefetched yet */
    const char *const *keys;
    long key, lines; /* key: index of the first of the current keys or values; lines: their cache lines */
    long together;   /* how many keys or values are current: those whose lines of these heads lie side by side */
    long pace;       /* how many of a head's four quarters are prefetched with its scores, and as many with its values;
                        the others while keys are transposed */
    ptrdiff_t offset; /* bytes from a key's address to the data to prefetch */
    long line; /* bytes from one cache line to the next */
} Prefetch;

/* Returns how many keys or values have their lines side by side. heads: how many heads are computed */
INLINE long keys_together(const AttentionArgs *a, long heads, int is_value) {
    if (a->kv_format != KV_TRANSPOSED) return 1;
    return is_value && heads < a->kv_heads ? 2 : KEYS_TOGETHER;
}

/* Plans the prefetch from part `quarter` of the next block on. A block has 4 parts for each head of the item: the first
 * half of the parts are keys, the second half values. While a head is computed, 4 parts are prefetched. */
INLINE Prefetch plan_prefetch(const AttentionArgs *a, Scratch *s, const WorkItem *item, long quarter) {
    const KeyAddresses *next = &address_scratch(s)->next;
    long half = item->heads * 2, is_value = quarter >= half, bytes = is_value ? value_bytes(a) : key_bytes(a);
    Prefetch p = {.keys = is_value ? next->values : next->keys, .line = 64};
    p.pace = a->kv_format == KV_TRANSPOSED ? 2 : 1;
    p.together = keys_together(a, item->heads, is_value);
    p.lines = (p.together * item->heads * bytes + 63) / 64;
    p.offset = address_scratch(s)->next_head * p.together * bytes;
    long key = (is_value ? quarter - half : quarter) * BLOCK_KEYS / half;
    long before = key % p.together * p.lines / p.together;
    p.key = key - key % p.together, p.left = p.lines - before;
    p.at = p.keys[p.key] + p.offset + before * 64;
    return p;
}

/* Prefetches the next `n` cache lines of the plan. */
INLINE void prefetch_lines(Prefetch *p, long n) {
    for (long i = 0; i < n; i++, p->at += p->line) __builtin_prefetch(p->at, 0, PREFETCH_LOCALITY);
    p->left -= n;
    if (p->left > 0) return;
    p->key = (p->key + p->together) % BLOCK_KEYS;
    p->at = p->keys[p->key] + p->offset, p->left = p->lines;
}

/* Returns a plan for tiles that have nothing to prefetch. AMX, which has no pace, prefetches the same line forever. */
INLINE Prefetch no_prefetch(const KeyAddresses *p) {
    return (Prefetch){.keys = p->keys, .at = p->keys[0], .left = INT64_MAX};
}
