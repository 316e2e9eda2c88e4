/* Attention in SIMD registers, computed in fp32.
 *
 * A score is the sum of four chains of multiply-adds over d, which are added in a fixed order. A register holds 4
 * elements of each of SIMD_WIDTH / 4 keys. So keys are not transposed, and only a few additions go across a register.
 * An output is one chain over the keys of a block, with consecutive d in a register. Decode steps read keys and values
 * in place. For more rows, a block is converted to fp32 and packed once. Both ways, in place and packed, give the same
 * bits. */
#include "simd.h"
#define OUT_STEP (2 * SIMD_WIDTH)
#include "attention_rows.h"
#include "fp32_products.h"

/* s->k, s->v: one head's packed block; tile->q: [16][chunks][CHUNK]; tile->weights: [16][BLOCK_KEYS] */

/* Flushes denormals to zero, as AMX does, so that a fully masked block leaves the state bit-identical. */
static void begin_work(void) { flush_denormals(1); }
static void end_work(void) { flush_denormals(0); }

INLINE vf state_exp(vf x) { return simd_exp(x); }
INLINE vf to_state(vf logits) { return logits; }

/* Returns the format of values. */
INLINE int format_of(const AttentionArgs *a) {
    if (a->kv_format == KV_INT4) return INT4;
    if (has_codes(a->kv_format)) return a->kv_format == KV_INT8 ? INT8 : FP8;
    return a->element_size == 2 ? BF16 : F32;
}

INLINE int format_of_keys(const int format) { return format == INT4 ? INT8 : format; }

/* Returns whether q and out hold even and odd elements separately, as widen_pairs does with bf16 pairs. */
INLINE int alternating(const AttentionArgs *a) { return format_of(a) == BF16; }

INLINE long token_head(const AttentionArgs *a, const Tile *tile, const WorkItem *item, int i, long *head) {
    long group = group_size(a), row = tile->row + i;
    *head = tile->head * group + row % group;
    return a->query_start_loc[item->seq] + row / group;
}

static void load_q(const AttentionArgs *a, Tile *tile, const WorkItem *item) {
    int is_bf16 = a->element_size == 2;
    for (int i = 0; i < tile->rows; i++) {
        long head, token = token_head(a, tile, item, i, &head);
        const char *q = a->q + (token * a->q_stride + head * a->d) * a->element_size;
        for (long j = 0; j < a->d * a->element_size; j += 64) /* the rows of the next tile */
            __builtin_prefetch(q + TILE_ROWS / group_size(a) * a->q_stride * a->element_size + j, 0, 3);
        float rotated[MAX_HEAD_DIM + SIMD_WIDTH], *to = (float *)tile->q + i * chunks_of(a) * CHUNK;
        if (is_rotated(a->kv_format)) {
            rotate_query(a, q, rotated);
            arrange_q((const char *)rotated, to, a->d, 0, alternating(a));
        } else
            arrange_q(q, to, a->d, is_bf16, alternating(a));
    }
}

/* Online softmax of one row: turns its scores into weights in place. Returns the factor by which the row's output so
 * far must be multiplied. */
INLINE float softmax_row(const AttentionArgs *a, Tile *tile, int row, long block, const Scales *scales, const int hide,
                         const int scaled, const int capped) {
    SoftmaxState *state = &tile->split;
    float *scores = tile->weights + row * BLOCK_KEYS;
    int32_t last = tile->last[row] - block, first = first_visible_key(a, tile->position[row]) - block;
    vi key = {0};
    for (int i = 0; i < SIMD_WIDTH; i++) key[i] = i;
    vf x[BLOCK_KEYS / SIMD_WIDTH], top = broadcast(MASKED_SCORE), sums[2] = {broadcast(0), broadcast(0)};
    vi seen[BLOCK_KEYS / SIMD_WIDTH];
    for (int i = 0; i < BLOCK_KEYS / SIMD_WIDTH; i++, key += SIMD_WIDTH) {
        seen[i] = (key <= last) & (key >= first);
        x[i] = load_f32(scores + i * SIMD_WIDTH);
        if (scaled) x[i] *= load_f32(scales->k + i * SIMD_WIDTH);
        if (capped) x[i] = simd_tanh(x[i] * a->cap_scale);
        if (hide) x[i] = simd_select(seen[i], x[i], broadcast(MASKED_SCORE));
        top = simd_max(top, x[i]);
    }
    vf old = broadcast(state->max[row]), max = simd_max(old, broadcast(simd_reduce_max(top) * a->scale));
    for (int i = 0; i < BLOCK_KEYS / SIMD_WIDTH; i++) {
        vf p = simd_exp(x[i] * a->scale - max);
        if (hide) p = simd_select(seen[i], p, broadcast(0));
        sums[i % 2] += p;
        store_f32(scores + i * SIMD_WIDTH, scaled ? p * load_f32(scales->v + i * SIMD_WIDTH) : p);
    }
    float rescale = simd_exp(old - max)[0];
    state->max[row] = max[0];
    state->sum[row] = state->sum[row] * rescale + simd_sum(sums[0] + sums[1]);
    return rescale;
}

static void softmax_tile(const AttentionArgs *a, Tile *tile, long block, const Scales *scales, float *rescale) {
    int all_seen =
        tile->last[0] >= block + BLOCK_KEYS - 1 && first_visible_key(a, tile->position[TILE_ROWS - 1]) <= block;
    for (int i = 0; i < tile->rows; i++)
        switch ((a->cap_scale > 0 ? 4 : 2 * !all_seen) + has_codes(a->kv_format)) {
            case 0: rescale[i] = softmax_row(a, tile, i, block, scales, 0, 0, 0); break;
            case 1: rescale[i] = softmax_row(a, tile, i, block, scales, 0, 1, 0); break;
            case 2: rescale[i] = softmax_row(a, tile, i, block, scales, 1, 0, 0); break;
            case 3: rescale[i] = softmax_row(a, tile, i, block, scales, 1, 1, 0); break;
            case 4: rescale[i] = softmax_row(a, tile, i, block, scales, 1, 0, 1); break;
            default: rescale[i] = softmax_row(a, tile, i, block, scales, 1, 1, 1);
        }
}

/* first_seen and end_seen return the range of keys that at least one row of the tile sees, relative to the block's
 * first key. */
INLINE long first_seen(const AttentionArgs *a, const KeyAddresses *p, const Tile *tile, long block) {
    return max_long(p->from, first_visible_key(a, tile->position[0]) - block);
}
INLINE long end_seen(const KeyAddresses *p, const Tile *tile, long block) {
    return min_long(p->to, tile->last[TILE_ROWS - 1] + 1 - block);
}

/* Computes attention of one tile to a block, reading keys and values in their pages. format: that of values */
INLINE void attend_in_place(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tile, long block,
                            const int format) {
    const KeyAddresses *p = &address_scratch(s)->here;
    long quarter = (tile->head - item->head) * 4;
    float rescale[TILE_ROWS];
    Prefetch prefetch = plan_prefetch(a, s, item, quarter);
    Keys keys = {.stride = a->kv_heads * key_bytes(a), .chunks = chunks_of(a), .prefetch = &prefetch};
    for (long i = p->from, next; i < p->to; i = next) { /* SIMD_WIDTH keys from key i on are in one page */
        next = min_long(p->to, i / SIMD_WIDTH * SIMD_WIDTH + SIMD_WIDTH);
        keys.first = p->keys[i] + tile->head * key_bytes(a) - i * keys.stride;
        score_tile_in_place(&keys, tile, i / SIMD_WIDTH * SIMD_WIDTH, format_of_keys(format));
    }
    const Scales *scales = head_scales(a, s, tile->head);
    softmax_tile(a, tile, block, scales, rescale);
    prefetch = plan_prefetch(a, s, item, quarter + 2);
    Values v = {.from = p->from, .to = p->to, .step_size = bytes_of(STEP, format), .d = a->d, .prefetch = &prefetch};
    for (long i = v.from; i < v.to; i++) v.rows[i] = p->values[i] + tile->head * value_bytes(a);
    accumulate_values(a, &v, tile, rescale, format);
}

/* Computes attention of a head's tiles to a block with packed keys and values. It computes the weights of all tiles
 * first, then their outputs. So only the keys, and later only the values, must fit in the cache. format: that of values
 */
INLINE void attend_packed(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tiles, int count, long block,
                          const int format) {
    const KeyAddresses *p = &address_scratch(s)->here;
    float rescale[MAX_ITEM_TILES][TILE_ROWS];
    long quarter = (tiles->head - item->head) * 4;
    Prefetch prefetch = plan_prefetch(a, s, item, quarter);
    pack_keys(a, p, tiles->head * key_bytes(a), (float *)s->k, &prefetch, format_of_keys(format));
    Keys keys = {.first = s->k, .chunks = chunks_of(a)};
    const Scales *scales = head_scales(a, s, tiles->head);
    for (int i = 0; i < count; i++) {
        if (!sees_block(a, &tiles[i], block)) continue;
        score_tile(&keys, &tiles[i], first_seen(a, p, &tiles[i], block), end_seen(p, &tiles[i], block));
        softmax_tile(a, &tiles[i], block, scales, rescale[i]);
    }
    prefetch = plan_prefetch(a, s, item, quarter + 2);
    pack_values(a, p, tiles->head * value_bytes(a), (float *)s->v, &prefetch, format);
    Values v = {.step_size = BLOCK_KEYS * STEP * sizeof(float)};
    for (long i = 0; i < BLOCK_KEYS; i++) v.rows[i] = s->v + i * STEP * sizeof(float);
    for (int i = 0; i < count; i++) {
        if (!sees_block(a, &tiles[i], block)) continue;
        v.from = first_seen(a, p, &tiles[i], block), v.to = end_seen(p, &tiles[i], block);
        accumulate_values(a, &v, &tiles[i], rescale[i], PACKED);
    }
}

INLINE void attend(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tiles, int count, long block,
                   const int format) {
    if (count == 1 && tiles->rows <= MAX_ROWS_IN_PLACE && a->d % STEP == 0 && a->page_size % SIMD_WIDTH == 0)
        attend_in_place(a, s, item, tiles, block, format);
    else
        attend_packed(a, s, item, tiles, count, block, format);
}

static void attend_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tiles, int count, long block) {
    switch (format_of(a)) {
        case F32: attend(a, s, item, tiles, count, block, F32); break;
        case BF16: attend(a, s, item, tiles, count, block, BF16); break;
        case INT8: attend(a, s, item, tiles, count, block, INT8); break;
        case INT4: attend(a, s, item, tiles, count, block, INT4); break;
        default: attend(a, s, item, tiles, count, block, FP8);
    }
}

/* Stores an output row as bf16. In each STEP elements of `row`, the even elements come first, then the odd elements. */
INLINE void store_alternating(const float *row, float inverse, char *out, long d) {
    uint32_t pairs[MAX_HEAD_DIM / 2 + SIMD_WIDTH];
    for (long i = 0; i < d; i += STEP) {
        vu even = bf16_bits(load_f32(row + i) * inverse + 0.0f);
        vu odd = bf16_bits(load_f32(row + i + SIMD_WIDTH) * inverse + 0.0f);
        vu both = even | odd << 16;
        __builtin_memcpy(pairs + i / 2, &both, sizeof both);
    }
    memcpy(out, pairs, 2 * d);
}

static void store_rows(const AttentionArgs *a, const Tile *tile, const SoftmaxState *state, const WorkItem *item) {
    float buffer[MAX_HEAD_DIM + OUT_STEP];
    for (int i = 0; i < tile->rows; i++) {
        long head, token = token_head(a, tile, item, i, &head);
        const float *row = rotated_back(a, state->out + i * out_stride(a), buffer);
        float inverse = 1.0f / state->sum[i];
        char *out = a->out + (token * a->heads + head) * a->d * a->element_size;
        /* adding 0 makes a zero positive: its sign depends on which denormals were flushed */
        if (alternating(a)) {
            store_alternating(row, inverse, out, a->d);
            continue;
        }
        for (long j = 0; j < a->d; j += SIMD_WIDTH) {
            vf x = load_f32(row + j) * inverse + 0.0f;
            if (a->element_size == 2)
                store(out, j, a->d, x, 1);
            else
                store(out, j, a->d, x, 0);
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
