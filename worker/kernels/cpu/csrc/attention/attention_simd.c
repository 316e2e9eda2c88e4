/* Attention on vector registers, fp32 inside: a row of q a lane; keys and values are widened block by block.
 *
 * A score is one chain of multiply-adds over d = 0, 1, ...; an output one chain over the keys of a block. */
#include "simd.h"
#define ROWS LANES
#include "attention/attention.h"
#include "attention/prefetch.h"

#define TOGETHER 8 /* keys, or elements of values, whose chains run side by side */

/* k, v: [KEYS][D padded to 16] fp32; q and State.out: [D][LANES] */

static Scratch *scratch_here(void) {
    static _Thread_local _Alignas(64) Scratch scratch;
    return &scratch;
}

static void enter(void) { flush_tiny(1); }
static void leave(void) { flush_tiny(0); }

INLINE float element(const AttentionArgs *a, const char *base, size_t i) {
    return a->element == 2 ? one_float(((const bf16 *)base)[i]) : ((const float *)base)[i];
}

static void take_q(const AttentionArgs *a, Tile *tile, const Item *item) {
    long group = group_of(a);
    float *q = (float *)tile->q;
    memset(q, 0, LANES * padded(a->d) * sizeof(float));
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->starts[item->seq] + row / group, head = tile->head * group + row % group;
        for (long j = 0; j < a->d; j++) q[j * LANES + i] = element(a, a->q, token * a->q_stride + head * a->d + j);
    }
}

static void widen(const AttentionArgs *a, const char *from, float *to) {
    long wide = padded(a->d);
    for (long i = 0; i < wide; i += LANES)
        store_f32(to + i, i >= a->d ? splat(0) : a->element == 2 ? load(from, i, a->d, 1) : load(from, i, a->d, 0));
}

static long head_bytes(const AttentionArgs *a) { return KEYS * padded(a->d) * sizeof(float); }

static void take_block(const AttentionArgs *a, Scratch *s, const Item *item, long block, long from, long to) {
    long wide = padded(a->d), bytes = a->d * a->element, row = a->kv_heads * bytes, each = head_bytes(a);
    memset(s->v, 0, item->heads * each);
    for (long at = from, run; at < to; at += run) {
        size_t slot = slot_of(a, item->seq, at, &run);
        run = least(run, to - at);
        for (long i = 0; i < run; i++) {
            size_t where = (slot + i) * row + item->head * bytes;
            char *k = s->k + (at - block + i) * wide * sizeof(float), *v = s->v + (k - s->k);
            for (int h = 0; h < item->heads; h++, where += bytes, k += each, v += each) {
                widen(a, a->cache_k + where, (float *)k);
                widen(a, a->cache_v + where, (float *)v);
            }
        }
    }
}

static void score(const AttentionArgs *a, const char *keys, Tile *tile) {
    long wide = padded(a->d);
    const float *q = (const float *)tile->q;
    for (long i = 0; i < KEYS; i += TOGETHER) {
        const float *k = (const float *)keys + i * wide;
        vf sum[TOGETHER];
        for (int j = 0; j < TOGETHER; j++) sum[j] = splat(0);
        for (long d = 0; d < wide; d++)
            for (int j = 0; j < TOGETHER; j++) sum[j] += load_f32(q + d * LANES) * k[j * wide + d];
        for (int j = 0; j < TOGETHER; j++) store_f32(tile->weights + (i + j) * LANES, sum[j]);
    }
}

typedef struct {
    vi last, first;
} Sight;

INLINE vi sees(const Sight *sight, int key) { return (sight->last >= key) & (sight->first <= key); }

/* Scores become weights in place; returns the factor on what was there before. */
static vf weigh(const AttentionArgs *a, Tile *tile, const Sight *sight, long block) {
    State *state = &tile->span;
    vf old = load_f32(state->max), top = splat(NOTHING), sums[2] = {splat(0), splat(0)};
    for (long i = 0; i < KEYS; i++)
        top = larger(top, pick(sees(sight, block + i), load_f32(tile->weights + i * LANES) * a->scale, splat(NOTHING)));
    vf max = larger(old, top);
    for (long i = 0; i < KEYS; i++) {
        vf p = exp_lanes(load_f32(tile->weights + i * LANES) * a->scale - max);
        p = pick(sees(sight, block + i), p, splat(0));
        sums[i % 2] += p;
        store_f32(tile->weights + i * LANES, p);
    }
    vf shrink = exp_lanes(old - max);
    store_f32(state->max, max);
    store_f32(state->sum, load_f32(state->sum) * shrink + (sums[0] + sums[1]));
    return shrink;
}

/* out[D][LANES] = out * shrink + values^T weights */
static void add_values(const AttentionArgs *a, const char *values, Tile *tile, vf shrink) {
    float *out = tile->span.out;
    long wide = padded(a->d);
    for (long d = 0; d < wide; d += TOGETHER) {
        vf sum[TOGETHER];
        for (int j = 0; j < TOGETHER; j++) sum[j] = load_f32(out + (d + j) * LANES) * shrink;
        for (long i = 0; i < KEYS; i++)
            for (int j = 0; j < TOGETHER; j++)
                sum[j] += load_f32(tile->weights + i * LANES) * ((const float *)values)[i * wide + d + j];
        for (int j = 0; j < TOGETHER; j++) store_f32(out + (d + j) * LANES, sum[j]);
    }
}

static void attend_block(const AttentionArgs *a, Scratch *s, const Item *item, Tile *tiles, int count, long block) {
    long head = tiles->head - item->head, skip = head * head_bytes(a);
    if (item->heads == 1) ask_for_part(a, s, item, block, 0, 1); /* where heads are read in one go it would disturb */
    for (Tile *tile = tiles; tile < tiles + count; tile++) {
        if (!in_sight(a, tile, block)) continue;
        Sight sight;
        __builtin_memcpy(&sight.last, tile->position, sizeof sight.last);
        sight.first = a->window ? sight.last - (int32_t)a->window + 1 : (vi){0};
        score(a, s->k + skip, tile);
        add_values(a, s->v + skip, tile, weigh(a, tile, &sight, block));
    }
}

SHARED void merge_span(const AttentionArgs *a, State *total, const State *span) {
    vf old = load_f32(total->max), new = load_f32(span->max), max = larger(old, new);
    vf keep = exp_lanes(old - max), add = exp_lanes(new - max);
    store_f32(total->max, max);
    store_f32(total->sum, load_f32(total->sum) * keep + load_f32(span->sum) * add);
    for (long i = 0; i < a->d * LANES; i += LANES)
        store_f32(total->out + i, load_f32(total->out + i) * keep + load_f32(span->out + i) * add);
}

static void put_rows(const AttentionArgs *a, const Tile *tile, const State *state, const Item *item) {
    long group = group_of(a);
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->starts[item->seq] + row / group, head = tile->head * group + row % group;
        float line[MOST_D + LANES];
        /* + 0: no sign on a zero, whatever was flushed on the way */
        for (long j = 0; j < a->d; j++) line[j] = state->out[j * LANES + i] / state->sum[i] + 0.0f;
        char *out = a->out + (token * a->heads + head) * a->d * a->element;
        for (long j = 0; j < a->d; j += LANES) {
            if (a->element == 2) store(out, j, a->d, load_f32(line + j), 1);
            else store(out, j, a->d, load_f32(line + j), 0);
        }
    }
}

static int run(AttentionArgs a, int threads) { return run_attention(&a, threads); }

__attribute__((visibility("default"))) int JOIN(attention_f32, SUFFIX)(ATTENTION_PARAMETERS) {
    const long element = 4;
    return run((AttentionArgs)ATTENTION_ARGS, threads);
}

__attribute__((visibility("default"))) int JOIN(attention_bf16, SUFFIX)(ATTENTION_PARAMETERS) {
    const long element = 2;
    return run((AttentionArgs)ATTENTION_ARGS, threads);
}
