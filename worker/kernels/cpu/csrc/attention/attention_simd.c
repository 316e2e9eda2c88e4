/* Attention in SIMD registers, computed in fp32: one row of q per register element. Keys and values are converted to
 * fp32 block by block.
 *
 * A score is one chain of multiply-adds over d = 0, 1, ...; an output is one chain over the keys of a block. */
#include "simd.h"
#define TILE_ROWS SIMD_WIDTH
#include "attention/attention.h"
#include "attention/prefetch.h"

#define CHAINS 8 /* independent chains of multiply-adds, interleaved to hide latency */

/* k, v: [BLOCK_KEYS][D padded to 16] fp32; q and SoftmaxState.out: [D][SIMD_WIDTH] */

static Scratch *thread_scratch(void) {
    static _Thread_local _Alignas(64) Scratch scratch;
    return &scratch;
}

static void begin_work(void) { flush_denormals(1); }
static void end_work(void) { flush_denormals(0); }

INLINE float read_float(const AttentionArgs *a, const char *base, size_t i) {
    return a->element_size == 2 ? bf16_to_float(((const bf16 *)base)[i]) : ((const float *)base)[i];
}

static void load_q(const AttentionArgs *a, Tile *tile, const WorkItem *item) {
    long group = group_size(a);
    float *q = (float *)tile->q;
    memset(q, 0, SIMD_WIDTH * pad_to_16(a->d) * sizeof(float));
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->query_start_loc[item->seq] + row / group,
             head = tile->head * group + row % group;
        for (long j = 0; j < a->d; j++)
            q[j * SIMD_WIDTH + i] = read_float(a, a->q, token * a->q_stride + head * a->d + j);
    }
}

static void widen_row(const AttentionArgs *a, const char *from, float *to) {
    long padded_d = pad_to_16(a->d);
    for (long i = 0; i < padded_d; i += SIMD_WIDTH)
        store_f32(to + i, i >= a->d              ? broadcast(0)
                          : a->element_size == 2 ? load(from, i, a->d, 1)
                                                 : load(from, i, a->d, 0));
}

static long head_block_bytes(const AttentionArgs *a) { return BLOCK_KEYS * pad_to_16(a->d) * sizeof(float); }

static void load_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, long block, long from, long to) {
    long padded_d = pad_to_16(a->d), bytes = a->d * a->element_size, row = a->kv_heads * bytes,
         stride_per_head = head_block_bytes(a);
    memset(s->v, 0, item->heads * stride_per_head);
    for (long at = from, contiguous; at < to; at += contiguous) {
        size_t slot = cache_slot(a, item->seq, at, &contiguous);
        contiguous = min_long(contiguous, to - at);
        for (long i = 0; i < contiguous; i++) {
            size_t where = (slot + i) * row + item->head * bytes;
            char *k = s->k + (at - block + i) * padded_d * sizeof(float), *v = s->v + (k - s->k);
            for (int h = 0; h < item->heads; h++, where += bytes, k += stride_per_head, v += stride_per_head) {
                widen_row(a, a->cache_k + where, (float *)k);
                widen_row(a, a->cache_v + where, (float *)v);
            }
        }
    }
}

static void score_tile(const AttentionArgs *a, const char *keys, Tile *tile) {
    long padded_d = pad_to_16(a->d);
    const float *q = (const float *)tile->q;
    for (long i = 0; i < BLOCK_KEYS; i += CHAINS) {
        const float *k = (const float *)keys + i * padded_d;
        vf sum[CHAINS];
        for (int j = 0; j < CHAINS; j++) sum[j] = broadcast(0);
        for (long d = 0; d < padded_d; d++)
            for (int j = 0; j < CHAINS; j++) sum[j] += load_f32(q + d * SIMD_WIDTH) * k[j * padded_d + d];
        for (int j = 0; j < CHAINS; j++) store_f32(tile->weights + (i + j) * SIMD_WIDTH, sum[j]);
    }
}

typedef struct {
    vi last, first;
} VisibleKeys;

INLINE vi is_visible(const VisibleKeys *visible, int key) { return (visible->last >= key) & (visible->first <= key); }

/* Online softmax: turns the scores into weights in place and returns the factor for the previous output. */
static vf softmax_tile(const AttentionArgs *a, Tile *tile, const VisibleKeys *visible, long block) {
    SoftmaxState *state = &tile->split;
    vf old = load_f32(state->max), top = broadcast(MASKED_SCORE), sums[2] = {broadcast(0), broadcast(0)};
    for (long i = 0; i < BLOCK_KEYS; i++)
        top = simd_max(top, simd_select(is_visible(visible, block + i),
                                        load_f32(tile->weights + i * SIMD_WIDTH) * a->scale, broadcast(MASKED_SCORE)));
    vf max = simd_max(old, top);
    for (long i = 0; i < BLOCK_KEYS; i++) {
        vf p = simd_exp(load_f32(tile->weights + i * SIMD_WIDTH) * a->scale - max);
        p = simd_select(is_visible(visible, block + i), p, broadcast(0));
        sums[i % 2] += p;
        store_f32(tile->weights + i * SIMD_WIDTH, p);
    }
    vf rescale = simd_exp(old - max);
    store_f32(state->max, max);
    store_f32(state->sum, load_f32(state->sum) * rescale + (sums[0] + sums[1]));
    return rescale;
}

/* Computes out[D][SIMD_WIDTH] = out * rescale + values^T weights. */
static void accumulate_values(const AttentionArgs *a, const char *values, Tile *tile, vf rescale) {
    float *out = tile->split.out;
    long padded_d = pad_to_16(a->d);
    for (long d = 0; d < padded_d; d += CHAINS) {
        vf sum[CHAINS];
        for (int j = 0; j < CHAINS; j++) sum[j] = load_f32(out + (d + j) * SIMD_WIDTH) * rescale;
        for (long i = 0; i < BLOCK_KEYS; i++)
            for (int j = 0; j < CHAINS; j++)
                sum[j] += load_f32(tile->weights + i * SIMD_WIDTH) * ((const float *)values)[i * padded_d + d + j];
        for (int j = 0; j < CHAINS; j++) store_f32(out + (d + j) * SIMD_WIDTH, sum[j]);
    }
}

static void attend_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tiles, int count, long block) {
    long head = tiles->head - item->head, offset = head * head_block_bytes(a);
    if (item->heads == 1) prefetch_next_part(a, s, item, block, 0, 1); /* slower when several heads are read together */
    for (Tile *tile = tiles; tile < tiles + count; tile++) {
        if (!sees_block(a, tile, block)) continue;
        VisibleKeys visible;
        __builtin_memcpy(&visible.last, tile->position, sizeof visible.last);
        visible.first = a->window ? visible.last - (int32_t)a->window + 1 : (vi){0};
        score_tile(a, s->k + offset, tile);
        accumulate_values(a, s->v + offset, tile, softmax_tile(a, tile, &visible, block));
    }
}

NOINLINE void merge_split(const AttentionArgs *a, SoftmaxState *total, const SoftmaxState *split) {
    vf old = load_f32(total->max), new = load_f32(split->max), max = simd_max(old, new);
    vf total_factor = simd_exp(old - max), split_factor = simd_exp(new - max);
    store_f32(total->max, max);
    store_f32(total->sum, load_f32(total->sum) * total_factor + load_f32(split->sum) * split_factor);
    for (long i = 0; i < a->d * SIMD_WIDTH; i += SIMD_WIDTH)
        store_f32(total->out + i, load_f32(total->out + i) * total_factor + load_f32(split->out + i) * split_factor);
}

static void store_rows(const AttentionArgs *a, const Tile *tile, const SoftmaxState *state, const WorkItem *item) {
    long group = group_size(a);
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->query_start_loc[item->seq] + row / group,
             head = tile->head * group + row % group;
        float line[MAX_HEAD_DIM + SIMD_WIDTH];
        /* + 0 removes the sign of a zero, which depends on flushed denormals */
        for (long j = 0; j < a->d; j++) line[j] = state->out[j * SIMD_WIDTH + i] / state->sum[i] + 0.0f;
        char *out = a->out + (token * a->heads + head) * a->d * a->element_size;
        for (long j = 0; j < a->d; j += SIMD_WIDTH) {
            if (a->element_size == 2)
                store(out, j, a->d, load_f32(line + j), 1);
            else
                store(out, j, a->d, load_f32(line + j), 0);
        }
    }
}

static int run_with(AttentionArgs a, int threads) { return run_attention(&a, threads); }

__attribute__((visibility("default"))) int JOIN(attention_f32, SUFFIX)(ATTENTION_PARAMETERS) {
    const long element_size = 4;
    return run_with((AttentionArgs)ATTENTION_ARGS, threads);
}

__attribute__((visibility("default"))) int JOIN(attention_bf16, SUFFIX)(ATTENTION_PARAMETERS) {
    const long element_size = 2;
    return run_with((AttentionArgs)ATTENTION_ARGS, threads);
}
