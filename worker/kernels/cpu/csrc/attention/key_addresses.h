/* The addresses of a block's keys, for kernels that read pages head by head, and the prefetch of the next block. */
#pragma once
#include "attention/attention.h"

#ifndef PREFETCH_LOCALITY
#define PREFETCH_LOCALITY 3 /* how near the next block is brought: the last argument of __builtin_prefetch */
#endif

/* Addresses of a block's keys, at head 0. Entries outside [from, to) point to another key, whose score is ignored. */
typedef struct {
    const char *keys[BLOCK_KEYS];
    long from, to; /* relative to the block's first key */
} KeyAddresses;

typedef struct {
    Scratch common;
    KeyAddresses here, next; /* here: the current block; next: the block that is read after it */
    int next_head;           /* the first head of the next block */
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

/* Records addresses only: the keys are read later, head by head, into the L1 cache. */
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

/* Returns the scales of the current block, of the head `offset` bytes from head 0. */
static const Scales *head_scales(const AttentionArgs *a, Scratch *s, ptrdiff_t offset, float factor) {
    AddressScratch *own = address_scratch(s);
    const KeyAddresses *p = &own->here;
    if (in_eight_bits(a->kv_format)) load_scales(a, p->keys, p->from, p->to, offset, factor, &own->scales);
    return &own->scales;
}

/* While a head is computed, a share of the next block is prefetched: some keys, with all heads of a key together. Then
 * the processor sees sequential reads at an even pace, and its hardware prefetcher runs further ahead. */
typedef struct {
    const char *at;  /* the next line */
    long left;       /* lines of this key from there on */
    const char *const *keys;
    long key, lines; /* the key's index; lines of every key */
    ptrdiff_t offset; /* from a key to the data to prefetch */
    long line; /* bytes from one line to the next */
} Prefetch;

/* Every head prefetches 4 quarters: first the keys of all heads, then the values. */
INLINE Prefetch plan_prefetch(const AttentionArgs *a, Scratch *s, const WorkItem *item, long quarter) {
    long half = item->heads * 2;
    Prefetch p = {.keys = address_scratch(s)->next.keys, .lines = (item->heads * head_bytes(a) + 63) / 64, .line = 64};
    p.offset = address_scratch(s)->next_head * head_bytes(a);
    if (quarter >= half) p.offset += a->cache_v - a->cache_k, quarter -= half;
    p.key = quarter * BLOCK_KEYS / half, p.left = p.lines;
    p.at = p.keys[p.key] + p.offset;
    return p;
}

/* Prefetches the next `n` lines of the plan. */
INLINE void prefetch_lines(Prefetch *p, long n) {
    for (long i = 0; i < n; i++, p->at += p->line) __builtin_prefetch(p->at, 0, PREFETCH_LOCALITY);
    p->left -= n;
    if (p->left > 0) return;
    p->key = (p->key + 1) % BLOCK_KEYS;
    p->at = p->keys[p->key] + p->offset, p->left = p->lines;
}

/* Repeats one prefetch for ever: for parts that have nothing to prefetch. */
INLINE Prefetch no_prefetch(const KeyAddresses *p) {
    return (Prefetch){.keys = p->keys, .at = p->keys[0], .left = INT64_MAX};
}
