/* Attention of packed rows over the paged KV cache: the loops and the division of work, which are the same for all
 * kernels.
 *
 * The `group` query heads that share a key/value head are treated as rows: row r of a sequence is token r / group and
 * query head r % group. Rows are processed in tiles. Keys are processed in blocks of BLOCK_KEYS, which start at
 * multiples of BLOCK_KEYS. Blocks are grouped in splits of SPLIT_KEYS, which start at multiples of SPLIT_KEYS. Within a
 * split, a row visits its blocks in order (online softmax: running maximum, sum and output). Each split starts from an
 * empty state, and splits are merged in order. So the bits of a row depend only on its position, window, keys and
 * values. A block that is masked for a row leaves the row's state bit-identical. An attention sink, an extra key whose
 * value is zero, is added to the sum of a row last, after all splits.
 *
 * The file that includes this header defines the functions declared below. */
#pragma once
#include "kv_format.h"
#include "model_limits.h"
#include <omp.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_KEYS 64   /* keys of a block; changing this number changes the bits of results */
#define SPLIT_KEYS 1024 /* keys of a split; changing this number changes the bits of results */
#define MAX_HEAD_TILES 16     /* the most tiles of one head in a work item; a block's keys are prepared once for all
                                 these tiles */
#define MAX_ITEM_TILES 16     /* the most tiles of all heads in a work item */
#define MASKED_SCORE (-1e30f) /* the score of a masked key, and the maximum before the first score */
#ifndef OUT_STEP
#define OUT_STEP 16 /* how many elements of a row of SoftmaxState.out a kernel computes together */
#endif
#ifndef MIN_ITEM_HEADS
#define MIN_ITEM_HEADS 1 /* how many heads a work item has if there are too few sequences for all threads */
#endif

typedef struct {
    const char *q, *cache_k, *cache_v;
    const int32_t *query_start_loc, *seq_lens, *page_table;
    const float *sinks;        /* [heads]: the logit of each query head's sink, or NULL */
    const int32_t *bidirectional_end; /* [T]: how many keys each token sees, at least as many as the token before it sees;
                                  NULL: each token sees the keys up to its own position */
    char *out;
    long seqs, q_stride, heads, kv_heads, d, page_size, page_table_stride, window, element_size;
    int kv_format;
    float scale, cap_scale; /* cap_scale 0: logit = scale * s, where s = q k^T; otherwise (soft cap): logit = scale *
                               tanh(cap_scale * s) */
} AttentionArgs;

typedef struct {
    float max[16], sum[16];       /* the maximum logit of each row, and the sum of its weights, over the blocks visited
                                     so far */
    float out[16 * MAX_HEAD_DIM]; /* weighted sums of values, not yet divided by `sum` */
} SoftmaxState;

typedef struct {
    _Alignas(64) SoftmaxState split;
    SoftmaxState total;
    _Alignas(64) char q[16 * MAX_HEAD_DIM * 4]; /* queries in the kernel's layout */
    float weights[BLOCK_KEYS * 16];
    int32_t position[16], last[16]; /* last: the last key that each row sees; entries from `rows` on copy the last
                                       row */
    int head, row, rows;
} Tile;

typedef struct {
    int seq, head, heads, row, rows; /* rows [row, row + rows) of each of `heads` kv heads */
    int split, splits; /* splits [split, split + splits) */
} WorkItem;

typedef struct {
    _Alignas(64) char k[BLOCK_KEYS * MAX_HEAD_DIM * 4]; /* one head's keys of a block, in the kernel's layout */
    char v[BLOCK_KEYS * MAX_HEAD_DIM * 4];              /* one head's values of the same block */
    float scores[2][BLOCK_KEYS * 16];
    Tile tiles[MAX_ITEM_TILES];
    const WorkItem *next_item; /* the next work item of this thread, or NULL */
} Scratch;

/* Returns s. Hides from gcc that s is thread-local; otherwise gcc would compute its address again in inner loops. */
INLINE Scratch *hide_origin(Scratch *s) {
    __asm__("" : "+r"(s));
    return s;
}

static void begin_work(void); /* sets up the thread's state before an item */
static void end_work(void);   /* restores the thread's state after an item */
static Scratch *thread_scratch(void);
/* Finds the keys and values [from, to) of a block in the pages. */
static void load_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, long block, long from, long to);
static void load_q(const AttentionArgs *a, Tile *tile, const WorkItem *item);
static void attend_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tiles, int count, long block);
NOINLINE void merge_split(const AttentionArgs *a, SoftmaxState *total, const SoftmaxState *split);
NOINLINE void add_sinks(const AttentionArgs *a, const Tile *tile, SoftmaxState *state);
static void store_rows(const AttentionArgs *a, const Tile *tile, const SoftmaxState *state, const WorkItem *item);

INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }
INLINE long group_size(const AttentionArgs *a) { return a->heads / a->kv_heads; }
INLINE long query_len(const AttentionArgs *a, int seq) { return a->query_start_loc[seq + 1] - a->query_start_loc[seq]; }
INLINE long position_of(const AttentionArgs *a, int seq, long row) {
    return a->seq_lens[seq] - query_len(a, seq) + row / group_size(a);
}
INLINE long last_visible_key(const AttentionArgs *a, int seq, long row) {
    if (a->bidirectional_end) return a->bidirectional_end[a->query_start_loc[seq] + row / group_size(a)] - 1;
    return position_of(a, seq, row);
}
INLINE long first_visible_key(const AttentionArgs *a, long position) {
    return a->window ? max_long(0, position - a->window + 1) : 0;
}

/* Returns the cache slot of a position. Sets *contiguous to the number of positions from this one to the end of its
 * page. */
INLINE size_t cache_slot(const AttentionArgs *a, int seq, long position, long *contiguous) {
    long page = position / a->page_size, offset = position - page * a->page_size;
    *contiguous = a->page_size - offset;
    return (size_t)a->page_table[seq * a->page_table_stride + page] * a->page_size + offset;
}

/* The bytes of one cached key or value. A token has one of each for every key/value head. */
INLINE long key_bytes(const AttentionArgs *a) {
    return kv_row_bytes(key_format(a->kv_format), a->d, a->element_size);
}
INLINE long value_bytes(const AttentionArgs *a) { return kv_row_bytes(a->kv_format, a->d, a->element_size); }

INLINE long pad_to_16(long d) { return (d + 15) / 16 * 16; }

/* Returns the number of elements from one row of SoftmaxState.out to the next. */
INLINE long out_stride(const AttentionArgs *a) { return (a->d + OUT_STEP - 1) / OUT_STEP * OUT_STEP; }

/* Writes a query to rotated [MAX_HEAD_DIM + SIMD_WIDTH], rotated as keys are. */
INLINE void rotate_query(const AttentionArgs *a, const char *q, float *rotated) {
    for (long i = 0; i < a->d; i += SIMD_WIDTH) store_f32(rotated + i, load(q, i, a->d, a->element_size == 2));
    rotate_blocks(rotated, a->d);
}

/* Returns a row of sums of values, rotated back if values are rotated. buffer [MAX_HEAD_DIM]: for the result */
INLINE const float *rotated_back(const AttentionArgs *a, const float *sums, float *buffer) {
    if (!is_rotated(a->kv_format)) return sums;
    memcpy(buffer, sums, out_stride(a) * sizeof(float));
    rotate_blocks(buffer, a->d);
    return buffer;
}

INLINE void reset_state(const AttentionArgs *a, SoftmaxState *state) {
    for (int i = 0; i < 16; i++) state->max[i] = MASKED_SCORE, state->sum[i] = 0;
    memset(state->out, 0, 16 * out_stride(a) * sizeof(float));
}

/* Copies a state. Of `out`, copies only the elements that this head dimension uses. */
INLINE void copy_state(const AttentionArgs *a, SoftmaxState *to, const SoftmaxState *from) {
    memcpy(to, from, offsetof(SoftmaxState, out) + 16 * out_stride(a) * sizeof(float));
}

/* Sets which rows the tiles of an item have, and their positions. Returns the number of tiles. */
static int place_tiles(const AttentionArgs *a, Scratch *s, const WorkItem *item) {
    int tiles = 0;
    for (int h = item->head; h < item->head + item->heads; h++)
        for (int r = 0; r < item->rows; r += TILE_ROWS, tiles++) {
            Tile *tile = &s->tiles[tiles];
            tile->head = h, tile->row = item->row + r, tile->rows = min_long(TILE_ROWS, item->rows - r);
            for (int i = 0; i < TILE_ROWS; i++) {
                long row_of = tile->row + min_long(i, tile->rows - 1);
                tile->position[i] = position_of(a, item->seq, row_of);
                tile->last[i] = last_visible_key(a, item->seq, row_of);
            }
        }
    return tiles;
}

INLINE long end_key(const AttentionArgs *a, const WorkItem *item) {
    return last_visible_key(a, item->seq, item->row + item->rows - 1) + 1;
}

INLINE long first_block(const AttentionArgs *a, const WorkItem *item, long split) {
    return max_long(split * SPLIT_KEYS,
                    first_visible_key(a, position_of(a, item->seq, item->row)) / BLOCK_KEYS * BLOCK_KEYS);
}

static void process_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, int tiles, long block) {
    long from = max_long(block, first_visible_key(a, position_of(a, item->seq, item->row)));
    long to = min_long(block + BLOCK_KEYS, end_key(a, item));
    int tiles_per_head = tiles / item->heads;
    load_block(a, s, item, block, from, to);
    for (int i = 0; i < tiles; i += tiles_per_head) attend_block(a, s, item, &s->tiles[i], tiles_per_head, block);
}

/* Returns whether any row of the tile sees any key of the block. */
INLINE int sees_block(const AttentionArgs *a, const Tile *tile, long block) {
    return tile->last[TILE_ROWS - 1] >= block && first_visible_key(a, tile->position[0]) < block + BLOCK_KEYS;
}

static void process_split(const AttentionArgs *a, Scratch *s, const WorkItem *item, int tiles, long split) {
    long end = min_long((split + 1) * SPLIT_KEYS, end_key(a, item));
    for (int i = 0; i < tiles; i++) reset_state(a, &s->tiles[i].split);
    for (long block = first_block(a, item, split); block < end; block += BLOCK_KEYS)
        process_block(a, s, item, tiles, block);
}

INLINE void finish_tile(const AttentionArgs *a, const Tile *tile, SoftmaxState *state, const WorkItem *item) {
    if (a->sinks) add_sinks(a, tile, state);
    store_rows(a, tile, state, item);
}

/* Computes a work item. If `partial` is NULL, stores the final output. Otherwise, the item has a single split, whose
 * state is stored in `partial` for a later merge. */
static void process_item(const AttentionArgs *a, Scratch *s, const WorkItem *item, SoftmaxState *partial) {
    begin_work();
    int tiles = place_tiles(a, s, item);
    for (int i = 0; i < tiles; i++) load_q(a, &s->tiles[i], item);
    int merge = item->splits > 1; /* if there is only one split, merging would change nothing */
    for (int i = 0; i < tiles && merge; i++) reset_state(a, &s->tiles[i].total);
    for (int split = item->split; split < item->split + item->splits; split++) {
        process_split(a, s, item, tiles, split);
        for (int i = 0; i < tiles && merge; i++) merge_split(a, &s->tiles[i].total, &s->tiles[i].split);
    }
    for (int i = 0; i < tiles; i++) {
        Tile *tile = &s->tiles[i];
        if (partial)
            copy_state(a, &partial[i], &tile->split);
        else
            finish_tile(a, tile, merge ? &tile->total : &tile->split, item);
    }
    end_work();
}

/* Merges items[0 .. n), which are the splits of the same rows. `partials` holds MAX_ITEM_TILES states for each item. */
static void merge_partials(const AttentionArgs *a, Scratch *s, const WorkItem *items, const SoftmaxState *partials,
                           int n) {
    begin_work();
    int tiles = place_tiles(a, s, items);
    for (int i = 0; i < tiles; i++) {
        reset_state(a, &s->tiles[i].total);
        for (int p = 0; p < n; p++) merge_split(a, &s->tiles[i].total, &partials[p * MAX_ITEM_TILES + i]);
        finish_tile(a, &s->tiles[i], &s->tiles[i].total, items);
    }
    end_work();
}

typedef struct {
    WorkItem *items;
    long n;
    int per_split; /* if true, an item has only one split, and partial results are merged at the end */
} WorkList;

/* Returns the number of splits per head, summed over all sequences. */
static long count_splits(const AttentionArgs *a) {
    long n = 0;
    for (int seq = 0; seq < a->seqs; seq++)
        n += (a->seq_lens[seq] - 1) / SPLIT_KEYS - first_visible_key(a, position_of(a, seq, 0)) / SPLIT_KEYS + 1;
    return n;
}

/* Returns the number of heads of an item: all heads if there are enough sequences, so that the cache is read
 * sequentially. */
INLINE long heads_per_item(const AttentionArgs *a, long rows, int threads) {
    long tiles = max_long(1, min_long(MAX_HEAD_TILES, (rows + TILE_ROWS - 1) / TILE_ROWS));
    return a->seqs < 4 * threads ? MIN_ITEM_HEADS : max_long(1, min_long(a->kv_heads, MAX_ITEM_TILES / tiles));
}

/* Fills `items` (if it is not NULL) and returns the number of items. Later rows see more keys and take longer, so they
 * come first. Threads then finish at about the same time. */
static long list_items(const AttentionArgs *a, WorkItem *items, int threads, int per_split) {
    long n = 0;
    for (int seq = 0; seq < a->seqs; seq++) {
        long rows = query_len(a, seq) * group_size(a), item_rows = MAX_HEAD_TILES * TILE_ROWS;
        long heads = heads_per_item(a, rows, threads);
        for (long row = (rows - 1) / item_rows * item_rows; rows && row >= 0; row -= item_rows)
            for (long head = 0; head < a->kv_heads; head += heads) {
                WorkItem item = {.seq = seq, .head = head, .row = row};
                item.heads = min_long(heads, a->kv_heads - head), item.rows = min_long(item_rows, rows - row);
                item.split = first_visible_key(a, position_of(a, seq, row)) / SPLIT_KEYS;
                item.splits = last_visible_key(a, seq, row + item.rows - 1) / SPLIT_KEYS + 1 - item.split;
                for (long i = 0; i < (per_split ? item.splits : 1); i++, n++) {
                    if (!items) continue;
                    items[n] = item;
                    if (per_split) items[n].split = item.split + i, items[n].splits = 1;
                }
            }
    }
    return n;
}

/* Processes all items. A thread reserves its next item before it starts the current item, so that it can prefetch the
 * next item's keys. */
static void process_items(const AttentionArgs *a, const WorkList *work, SoftmaxState *partials, int threads) {
    long next = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Scratch *s = thread_scratch();
        long i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
        for (long next_item; i < work->n; i = next_item) {
            next_item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            s->next_item = next_item < work->n ? &work->items[next_item] : NULL;
            process_item(a, s, &work->items[i], partials ? partials + i * MAX_ITEM_TILES : NULL);
        }
    }
}

static void process_and_merge(const AttentionArgs *a, const WorkList *work, SoftmaxState *partials, int threads) {
    process_items(a, work, partials, threads);
    for (long i = 0, n; i < work->n; i += n) {
        const WorkItem *first = &work->items[i];
        for (n = 1; i + n < work->n; n++) {
            const WorkItem *next = first + n;
            if (next->seq != first->seq || next->head != first->head || next->row != first->row) break;
        }
        merge_partials(a, thread_scratch(), first, partials + i * MAX_ITEM_TILES, n);
    }
}

/* Returns whether there are so few multiplications that a second thread costs more than it saves. */
static int is_small(const AttentionArgs *a) {
    long work = 0;
    for (int seq = 0; seq < a->seqs; seq++) work += query_len(a, seq) * a->seq_lens[seq];
    return work * a->heads * a->d < (1L << 17);
}

/* Returns 0, or 1 when memory for the work list is exhausted. */
static int run_attention(const AttentionArgs *a, int threads) {
    if (is_small(a)) threads = 1;
    long whole = list_items(a, NULL, threads, 0), splits = list_items(a, NULL, threads, 1);
    WorkList work = {.per_split = threads > 1 && whole < 2 * threads && splits > whole, .n = whole};
    if (work.per_split) work.n = splits;
    work.items = malloc(max_long(1, work.n) * sizeof(WorkItem));
    SoftmaxState *partials = work.per_split ? malloc(work.n * MAX_ITEM_TILES * sizeof(SoftmaxState)) : NULL;
    int failed = !work.items || (work.per_split && !partials);
    if (!failed) {
        list_items(a, work.items, threads, work.per_split);
        if (work.per_split)
            process_and_merge(a, &work, partials, threads);
        else
            process_items(a, &work, NULL, threads);
    }
    free(partials);
    free(work.items);
    return failed;
}

#define ATTENTION_PARAMETERS                                                                                          \
    const char *q, const char *cache_k, const char *cache_v, const int32_t *query_start_loc, const int32_t *seq_lens, \
        const int32_t *page_table, const float *sinks, const int32_t *bidirectional_end, char *out, long seqs,               \
        long q_stride, long heads, long kv_heads, long d, long page_size, long page_table_stride, long window,        \
        int kv_format, float scale, float softcap, int threads
#define ATTENTION_ARGS                                                                                            \
    {q,        cache_k, cache_v, query_start_loc, seq_lens, page_table,        sinks,  bidirectional_end,   out,         \
     seqs,     q_stride, heads,  kv_heads,        d,        page_size, page_table_stride, window, element_size,   \
     kv_format, softcap > 0 ? softcap : scale, softcap > 0 ? scale / softcap : 0}
