/* The addresses of a block's keys, for kernels that read pages head by head. Also the prefetch of the next block. */
#pragma once
#include "attention.h"

#ifndef PREFETCH_LOCALITY
#define PREFETCH_LOCALITY 3 /* the cache into which the next block is prefetched, as for __builtin_prefetch: 3 is L1 */
#endif

/* The addresses of a block's keys at head 0. Entries outside [from, to) point to key `from` and are ignored. */
typedef struct {
    const char *keys[BLOCK_KEYS];
    long from, to; /* counted from the block's first key */
} KeyAddresses;

typedef struct {
    Scratch common;
    KeyAddresses here, next; /* here: the current block; next: the block after it */
    int next_head;           /* the first head to compute in the next block */
    Scales scales;           /* the scales of the current head, if the cache has eight bits */
} AddressScratch;

INLINE AddressScratch *address_scratch(Scratch *s) { return (AddressScratch *)s; }

static Scratch *thread_scratch(void) {
    static _Thread_local _Alignas(64) AddressScratch scratch;
    return hide_origin(&scratch.common);
}

static void locate_keys(const AttentionArgs *a, KeyAddresses *p, int seq, long block, long from, long to) {
    long row = token_bytes(a);
    for (long at = from, contiguous; at < to; at += contiguous) {
        const char *key = a->cache_k + cache_slot(a, seq, at, &contiguous) * row;
        contiguous = min_long(contiguous, to - at);
        for (long i = 0; i < contiguous; i++) p->keys[at - block + i] = key + i * row;
    }
    p->from = from - block, p->to = to - block;
    for (long i = 0; i < p->from; i++) p->keys[i] = p->keys[p->from];
    for (long i = p->to; i < BLOCK_KEYS; i++) p->keys[i] = p->keys[p->from];
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

/* Returns the current block's scales for the head that is `offset` bytes after head 0. Sets them only if the cache has
 * 8-bit codes. */
static const Scales *head_scales(const AttentionArgs *a, Scratch *s, ptrdiff_t offset, float factor) {
    AddressScratch *own = address_scratch(s);
    const KeyAddresses *p = &own->here;
    if (in_eight_bits(a->kv_format)) load_scales(a, p->keys, p->from, p->to, offset, factor, &own->scales);
    return &own->scales;
}

/* While a head of the current block is computed, a part of the next block is prefetched: all heads of some of its keys.
 * The processor then sees sequential reads at an even pace, and its hardware prefetcher runs further ahead. */
typedef struct {
    const char *at;  /* the next cache line to prefetch */
    long left;       /* how many cache lines of the current key are not prefetched yet */
    const char *const *keys;
    long key, lines; /* key: index of the current key; lines: cache lines of a key */
    ptrdiff_t offset; /* bytes from a key's address to the data to prefetch */
    long line; /* bytes from one cache line to the next */
} Prefetch;

/* Plans the prefetch from part `quarter` of the next block on. A block has 4 parts for each head of the item: the first
 * half of the parts are keys, the second half values. While a head is computed, 4 parts are prefetched. */
INLINE Prefetch plan_prefetch(const AttentionArgs *a, Scratch *s, const WorkItem *item, long quarter) {
    long half = item->heads * 2;
    Prefetch p = {.keys = address_scratch(s)->next.keys, .lines = (item->heads * head_bytes(a) + 63) / 64, .line = 64};
    p.offset = address_scratch(s)->next_head * head_bytes(a);
    if (quarter >= half) p.offset += a->cache_v - a->cache_k, quarter -= half;
    p.key = quarter * BLOCK_KEYS / half, p.left = p.lines;
    p.at = p.keys[p.key] + p.offset;
    return p;
}

/* Prefetches the next `n` cache lines of the plan. */
INLINE void prefetch_lines(Prefetch *p, long n) {
    for (long i = 0; i < n; i++, p->at += p->line) __builtin_prefetch(p->at, 0, PREFETCH_LOCALITY);
    p->left -= n;
    if (p->left > 0) return;
    p->key = (p->key + 1) % BLOCK_KEYS;
    p->at = p->keys[p->key] + p->offset, p->left = p->lines;
}

/* Returns a plan that prefetches the same line forever, for tiles that have nothing to prefetch. */
INLINE Prefetch no_prefetch(const KeyAddresses *p) {
    return (Prefetch){.keys = p->keys, .at = p->keys[0], .left = INT64_MAX};
}
