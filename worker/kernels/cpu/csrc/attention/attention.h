/* Attention of packed rows over the paged cache: the walk over the work, common to all kernels.
 *
 * The query heads of a key/value head are more rows of the same keys: row r of a sequence is token r / group, head
 * r % group. Rows are taken in tiles; keys in blocks of KEYS that start at multiples of KEYS, in spans of SPAN that start
 * at multiples of SPAN. A row sees its keys block by block (running maximum, sum and output), starts afresh with every
 * span, and its spans are merged in order. So its bits depend on its position, window, keys and values only. Blocks
 * that a row may not see leave its state as it was, to the bit.
 *
 * The includer defines the functions declared below. */
#pragma once
#include "simd.h"
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define KEYS 64          /* keys of a block; part of the result's bits */
#define SPAN 1024        /* keys of a span; part of the result's bits */
#define MOST_D 256
#define HEAD_TILES 16    /* most tiles of one head in an item: they share what is done once per block */
#define ITEM_TILES 16    /* most tiles of an item */
#define NOTHING (-1e30f) /* the maximum of no scores */
#ifndef FEW_HEADS
#define FEW_HEADS 1 /* heads of an item where there are too few sequences to give each thread some */
#endif

typedef struct {
    const char *q, *cache_k, *cache_v;
    const int32_t *starts, *kv_lens, *pages;
    char *out;
    long seqs, q_stride, heads, kv_heads, d, page_size, page_stride, window, element;
    float scale;
} AttentionArgs;

typedef struct {
    float max[16], sum[16]; /* of the scores seen so far, one a row */
    float out[16 * MOST_D]; /* not yet divided by the sum */
} State;

typedef struct {
    _Alignas(64) State span;
    State total;
    _Alignas(64) char q[16 * MOST_D * 4]; /* as the kernel wants it */
    float weights[KEYS * 16];
    int32_t position[16];                 /* rows beyond `rows` repeat the last one's */
    int head, row, rows;
} Tile;

typedef struct {
    int seq, head, heads, row, rows; /* rows [row, row + rows) of each of `heads` kv heads */
    int span, spans;                 /* the spans done here; several items of one span each are merged afterwards */
} Item;

typedef struct {
    _Alignas(64) char k[ITEM_TILES * KEYS * MOST_D * 4], v[ITEM_TILES * KEYS * MOST_D * 4]; /* a block, head by head */
    float scores[2][KEYS * 16];
    Tile tiles[ITEM_TILES];
    const Item *then; /* what this thread does next, or NULL */
    int taken;        /* for the kernel's own use: whether the block was copied */
} Scratch;

static void enter(void);  /* a thread's state before work on an item, */
static void leave(void);  /* and after */
static Scratch *scratch_here(void);
/* One block of the item's kv heads, keys [from, to) of the sequence, from the pages to s->k and s->v, one head
 * after the other; to - from <= KEYS. The heads of a key lie together: they are read in one go. */
static void take_block(const AttentionArgs *a, Scratch *s, const Item *item, long block, long from, long to);
static void take_q(const AttentionArgs *a, Tile *tile, const Item *item);
static void attend_block(const AttentionArgs *a, Scratch *s, const Item *item, Tile *tiles, int count, long block);
SHARED void merge_span(const AttentionArgs *a, State *total, const State *span);
static void put_rows(const AttentionArgs *a, const Tile *tile, const State *state, const Item *item);

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }
INLINE long group_of(const AttentionArgs *a) { return a->heads / a->kv_heads; }
INLINE long q_len(const AttentionArgs *a, int seq) { return a->starts[seq + 1] - a->starts[seq]; }
INLINE long position_of(const AttentionArgs *a, int seq, long row) {
    return a->kv_lens[seq] - q_len(a, seq) + row / group_of(a);
}
INLINE long first_key(const AttentionArgs *a, long position) { return a->window ? most(0, position - a->window + 1) : 0; }

/* Where the keys of `position` lie, and in *run how many positions follow it in its page. */
INLINE size_t slot_of(const AttentionArgs *a, int seq, long position, long *run) {
    long page = position / a->page_size, offset = position - page * a->page_size;
    *run = a->page_size - offset;
    return (size_t)a->pages[seq * a->page_stride + page] * a->page_size + offset;
}

INLINE long padded(long d) { return (d + 15) / 16 * 16; }

INLINE void begin(const AttentionArgs *a, State *state) {
    for (int i = 0; i < 16; i++) state->max[i] = NOTHING, state->sum[i] = 0;
    memset(state->out, 0, 16 * padded(a->d) * sizeof(float));
}

static int begin_item(const AttentionArgs *a, Scratch *s, const Item *item) {
    int tiles = 0;
    for (int h = item->head; h < item->head + item->heads; h++)
        for (int r = 0; r < item->rows; r += ROWS, tiles++) {
            Tile *tile = &s->tiles[tiles];
            tile->head = h, tile->row = item->row + r, tile->rows = least(ROWS, item->rows - r);
            for (int i = 0; i < ROWS; i++)
                tile->position[i] = position_of(a, item->seq, tile->row + least(i, tile->rows - 1));
            take_q(a, tile, item);
        }
    return tiles;
}

INLINE long last_key(const AttentionArgs *a, const Item *item) {
    return position_of(a, item->seq, item->row + item->rows - 1) + 1;
}

INLINE long first_block(const AttentionArgs *a, const Item *item, long span) {
    return most(span * SPAN, first_key(a, position_of(a, item->seq, item->row)) / KEYS * KEYS);
}

static void do_block(const AttentionArgs *a, Scratch *s, const Item *item, int tiles, long block) {
    long from = most(block, first_key(a, position_of(a, item->seq, item->row)));
    long to = least(block + KEYS, last_key(a, item));
    int each = tiles / item->heads;
    take_block(a, s, item, block, from, to);
    for (int i = 0; i < tiles; i += each) attend_block(a, s, item, &s->tiles[i], each, block);
}

/* Whether any row of the tile may see any key of the block. */
INLINE int in_sight(const AttentionArgs *a, const Tile *tile, long block) {
    return tile->position[ROWS - 1] >= block && first_key(a, tile->position[0]) < block + KEYS;
}

static void do_span(const AttentionArgs *a, Scratch *s, const Item *item, int tiles, long span) {
    long end = least((span + 1) * SPAN, last_key(a, item));
    for (int i = 0; i < tiles; i++) begin(a, &s->tiles[i].span);
    for (long block = first_block(a, item, span); block < end; block += KEYS) do_block(a, s, item, tiles, block);
}

/* All spans of an item here; or one, left in `part` for the merge. */
static void do_item(const AttentionArgs *a, Scratch *s, const Item *item, State *part) {
    enter();
    int tiles = begin_item(a, s, item);
    int merge = item->spans > 1; /* merging a single span would leave it as it is */
    for (int i = 0; i < tiles && merge; i++) begin(a, &s->tiles[i].total);
    for (int span = item->span; span < item->span + item->spans; span++) {
        do_span(a, s, item, tiles, span);
        for (int i = 0; i < tiles && merge; i++) merge_span(a, &s->tiles[i].total, &s->tiles[i].span);
    }
    for (int i = 0; i < tiles; i++) {
        Tile *tile = &s->tiles[i];
        if (part) part[i] = tile->span;
        else put_rows(a, tile, merge ? &tile->total : &tile->span, item);
    }
    leave();
}

/* items[0 .. n) are the spans of the same rows; parts hold ITEM_TILES states an item. */
static void merge_parts(const AttentionArgs *a, Scratch *s, const Item *items, const State *parts, int n) {
    enter();
    int tiles = begin_item(a, s, items);
    for (int i = 0; i < tiles; i++) {
        begin(a, &s->tiles[i].total);
        for (int p = 0; p < n; p++) merge_span(a, &s->tiles[i].total, &parts[p * ITEM_TILES + i]);
        put_rows(a, &s->tiles[i], &s->tiles[i].total, items);
    }
    leave();
}

/* Tiny numbers are zeros, as AMX has it, so that a block which adds nothing changes nothing. */
INLINE void flush_tiny(int on) { _mm_setcsr(on ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u); }

typedef struct {
    Item *items;
    long n;
    int split; /* whether an item is one span */
} Work;

/* Heads of one item: all of them where there are sequences enough, so that the cache is read in one stream. */
INLINE long heads_each(const AttentionArgs *a, long rows, int threads) {
    long tiles = most(1, least(HEAD_TILES, (rows + ROWS - 1) / ROWS));
    return a->seqs < 4 * threads ? FEW_HEADS : most(1, least(a->kv_heads, ITEM_TILES / tiles));
}

/* Later rows see more keys: they come first, so that the threads finish together. */
static long list_items(const AttentionArgs *a, Item *items, int threads, int split) {
    long n = 0;
    for (int seq = 0; seq < a->seqs; seq++) {
        long rows = q_len(a, seq) * group_of(a), each = HEAD_TILES * ROWS, heads = heads_each(a, rows, threads);
        for (long row = (rows - 1) / each * each; rows && row >= 0; row -= each)
            for (long head = 0; head < a->kv_heads; head += heads) {
                Item item = {seq, head, least(heads, a->kv_heads - head), row, least(each, rows - row), 0, 0};
                item.span = first_key(a, position_of(a, seq, row)) / SPAN;
                item.spans = position_of(a, seq, row + item.rows - 1) / SPAN + 1 - item.span;
                for (long i = 0; i < (split ? item.spans : 1); i++, n++) {
                    if (!items) continue;
                    items[n] = item;
                    if (split) items[n].span = item.span + i, items[n].spans = 1;
                }
            }
    }
    return n;
}

/* Each thread takes its next item before it begins the one it has, so that what that needs can be asked for. */
static void do_items(const AttentionArgs *a, const Work *work, State *parts, int threads) {
    long next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch *s = scratch_here();
        long i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        for (long then; i < work->n; i = then) {
            then = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            s->then = then < work->n ? &work->items[then] : NULL;
            do_item(a, s, &work->items[i], parts ? parts + i * ITEM_TILES : NULL);
        }
    }
}

static void do_split(const AttentionArgs *a, const Work *work, State *parts, int threads) {
    do_items(a, work, parts, threads);
    for (long i = 0, n; i < work->n; i += n) {
        const Item *first = &work->items[i];
        for (n = 1; i + n < work->n; n++) {
            const Item *next = first + n;
            if (next->seq != first->seq || next->head != first->head || next->row != first->row) break;
        }
        merge_parts(a, scratch_here(), first, parts + i * ITEM_TILES, n);
    }
}

/* Multiplications for one head's scores, roughly: too few and a second thread costs more than it brings. */
static int is_small(const AttentionArgs *a) {
    long work = 0;
    for (int seq = 0; seq < a->seqs; seq++) work += q_len(a, seq) * a->kv_lens[seq];
    return work * a->heads * a->d < (1L << 17);
}

/* Returns 0, or 1 when memory for the list of work could not be had. */
static int run_attention(const AttentionArgs *a, int threads) {
    if (is_small(a)) threads = 1;
    long whole = list_items(a, NULL, threads, 0), spans = list_items(a, NULL, threads, 1);
    Work work = {.split = threads > 1 && whole < 2 * threads && spans > whole, .n = whole};
    if (work.split) work.n = spans;
    work.items = malloc(most(1, work.n) * sizeof(Item));
    State *parts = work.split ? malloc(work.n * ITEM_TILES * sizeof(State)) : NULL;
    int failed = !work.items || (work.split && !parts);
    if (!failed) {
        list_items(a, work.items, threads, work.split);
        if (work.split) do_split(a, &work, parts, threads);
        else do_items(a, &work, NULL, threads);
    }
    free(parts);
    free(work.items);
    return failed;
}

#define ATTENTION_PARAMETERS                                                                                           \
    const char *q, const char *cache_k, const char *cache_v, const int32_t *starts, const int32_t *kv_lens,        \
        const int32_t *pages, char *out, long seqs, long q_stride, long heads, long kv_heads, long d,              \
        long page_size, long page_stride, long window, float scale, int threads
#define ATTENTION_ARGS                                                                                              \
    {q, cache_k, cache_v, starts, kv_lens, pages, out, seqs, q_stride, heads, kv_heads, d, page_size, page_stride, \
     window, element, scale}
