/* bf16 attention with vdpbf16ps. Keys are transposed, KEYS_TOGETHER of them together, to [pairs of d][keys], or are stored
 * so. So each score is one chain over the pairs of d, in its own element of a register. The weights are rounded to bf16.
 * Pairs of weights are multiplied by values that are interleaved in pairs of keys, so each output is one chain over the
 * key pairs of a block. Missing rows of a tile are skipped: a decode step computes only the query heads that share a
 * key/value head. */
#include "bf16_rows.h"
#include "key_addresses.h"

/* For one head, s->k: [BLOCK_KEYS / KEYS_TOGETHER][D / 2 padded to 16][KEYS_TOGETHER][2];
 * s->v: [BLOCK_KEYS / 2][D padded to 16][2];
 * tile->q: [16][D padded to 32]; s->scores: [16][BLOCK_KEYS]; tile->weights: [16][BLOCK_KEYS] bf16 */

#define MAX_ROWS_AT_ONCE 6 /* the most rows with 4 registers of scores or outputs each; with 8 registers each, 3 rows */

static void begin_work(void) { flush_denormals(1); }
static void end_work(void) { flush_denormals(0); }

static void load_q(const AttentionArgs *a, Tile *tile, const WorkItem *item) {
    long group = group_size(a), row_stride = head_dim_steps(a) * 64;
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->query_start_loc[item->seq] + row / group,
             head = tile->head * group + row % group;
        bf16 buffer[MAX_HEAD_DIM];
        const bf16 *q = query_for_keys(a, (const bf16 *)a->q + token * a->q_stride + head * a->d, buffer);
        for (long j = 0; j < a->d; j += 32)
            _mm512_store_si512(tile->q + i * row_stride + j * 2, _mm512_maskz_loadu_epi16(column_mask(a->d, j), q + j));
    }
}

/* The bytes from one pair of d to the next. Registers of neighbouring keys lie side by side: if they were a whole head
 * apart, as many bytes as a power of two, they would be in the same set of the L1 cache. */
#define PAIR_BYTES (KEYS_TOGETHER * 4)

/* Returns the address of the first pair of key i of a block, in transposed keys of `d` elements. */
INLINE char *transposed_keys(char *keys, long d, long i) {
    return keys + i / KEYS_TOGETHER * KEYS_TOGETHER * d * 2 + i % KEYS_TOGETHER * 4;
}

INLINE void transpose_keys(const AttentionArgs *a, const KeyAddresses *p, long offset, char *to, Prefetch *prefetch,
                           const int kv_format) {
    const long lines = has_codes(kv_format) ? 1 : 2;
    for (long i = p->from / 16 * 16; i < p->to; i += 16)
        for (long step = 0; step < head_dim_steps(a); step++) {
            __m512i rows[16];
            for (int j = 0; j < 16; j++) rows[j] = load_32(p->keys[i + j] + offset, a->d, step * 32, key_format(kv_format));
            for (int j = 0; j < 8; j++) prefetch_lines(prefetch, lines);
            transpose_16x16(rows);
            char *first = transposed_keys(to, head_dim_steps(a) * 32, i) + step * 16 * PAIR_BYTES;
            for (int j = 0; j < 16; j++) _mm512_store_si512(first + j * PAIR_BYTES, rows[j]);
        }
}

/* Finds the keys of a head, 16 for each address, where they are stored transposed. Those outside [p->from, p->to) are
 * masked, so any address will do. */
static void locate_transposed(const AttentionArgs *a, const KeyAddresses *p, long head, const char **keys) {
    long bytes = key_bytes(a), row = a->kv_heads * bytes;
    for (long i = 0; i < BLOCK_KEYS; i += 16) {
        long seen = min_long(max_long(i, p->from), p->to - 1), together = seen % KEYS_TOGETHER;
        keys[i / 16] = p->keys[seen] - together * row + head * KEYS_TOGETHER * bytes + together / 16 * 64;
    }
}

/* Interleaves the values of two keys. The values of a missing key (NULL) become zeros. */
INLINE void interleave_values(const char *even, const char *odd, char *to, long d, const int kv_format) {
    for (long i = 0; i < d; i += 32) {
        __m512i out[2];
        interleave_32(even, odd, d, i, out, kv_format);
        _mm512_store_si512(to + i * 4, out[0]);
        if (i + 16 < d) _mm512_store_si512(to + i * 4 + 64, out[1]);
    }
}

/* Copies an interleaved pair of values of which one key is missing. The missing key's elements become zeros. */
static void mask_pair(const char *pair, int odd, char *to, long d) {
    __mmask32 there = odd ? 0xaaaaaaaau : 0x55555555u;
    for (long i = 0; i < d; i += 16) _mm512_store_si512(to + i * 4, _mm512_maskz_loadu_epi16(there, pair + i * 4));
}

/* Finds the interleaved value pairs of a head. Pairs that are stored interleaved and read only once (not `reused`) are
 * used in their pages. All other pairs are copied to `buffer`. */
static void locate_value_pairs(const AttentionArgs *a, const KeyAddresses *p, long head, char *buffer, int reused,
                               const char **pairs) {
    long row = value_bytes(a), bytes = pad_to_16(a->d) * 4;
    for (long i = p->from / 2; i < (p->to + 1) / 2; i++) {
        int even = 2 * i >= p->from, odd = 2 * i + 1 < p->to;
        char *to = buffer + i * bytes;
        pairs[i] = to;
        if (!pairs_values(a->kv_format)) {
            const char *x = even ? p->values[2 * i] + head * row : NULL;
            const char *y = odd ? p->values[2 * i + 1] + head * row : NULL;
            WITH_KV_FORMAT(interleave_values, x, y, to, a->d)
            continue;
        }
        const char *pair = (even ? p->values[2 * i] : p->values[2 * i + 1] - a->kv_heads * row) + head * a->d * 4;
        if (!even || !odd)
            mask_pair(pair, !even, to, a->d);
        else if (reused)
            memcpy(to, pair, bytes);
        else
            pairs[i] = pair;
    }
}

#define CASES_UP_TO_6(body, ...)         \
    case 1: body(__VA_ARGS__, 1); break; \
    case 2: body(__VA_ARGS__, 2); break; \
    case 3: body(__VA_ARGS__, 3); break; \
    case 4: body(__VA_ARGS__, 4); break; \
    case 5: body(__VA_ARGS__, 5); break; \
    case 6: body(__VA_ARGS__, 6); break;

/* Computes scores[rows][BLOCK_KEYS] = q k^T. keys: the addresses of 16 transposed keys each */
INLINE void score_rows(const char *q, const char *const *keys, long steps, float *scores, Prefetch *prefetch,
                       const int rows) {
    __m512 sum[MAX_ROWS_AT_ONCE][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) sum[r][j] = _mm512_setzero_ps();
    for (long i = 0; i < steps * 16; i++, q += 4) {
        for (int j = 0; j < prefetch->pace; j++) prefetch_lines(prefetch, 2);
        __m512bh k[4];
        for (int j = 0; j < 4; j++) k[j] = (__m512bh)_mm512_loadu_si512(keys[j] + i * PAIR_BYTES);
        for (int r = 0; r < rows; r++) {
            __m512i pair = _mm512_set1_epi32(*(const int32_t *)(q + r * steps * 64));
            __asm__("" : "+v"(pair)); /* keeps gcc from loading the pair again for each column register */
            for (int j = 0; j < 4; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], (__m512bh)pair, k[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) _mm512_store_ps(scores + r * BLOCK_KEYS + j * 16, sum[r][j]);
}

static void score_tile(const AttentionArgs *a, const char *const *keys, const Tile *tile, float *scores,
                       Prefetch *prefetch) {
    long steps = head_dim_steps(a), parts = (tile->rows + MAX_ROWS_AT_ONCE - 1) / MAX_ROWS_AT_ONCE;
    for (long part = 0, row = 0, end; part < parts; part++, row = end) {
        end = (part + 1) * tile->rows / parts;
        const char *q = tile->q + row * steps * 64;
        switch (end - row) { CASES_UP_TO_6(score_rows, q, keys, steps, scores + row * BLOCK_KEYS, prefetch) }
    }
}

/* Online softmax of one row: turns its scores into bf16 weights. Returns the factor by which the row's output so far
 * must be multiplied. */
INLINE float softmax_row(const AttentionArgs *a, const float *scores, Tile *tile, int row, long block,
                         const Scales *scales, const int hide, const int scaled, const int capped) {
    SoftmaxState *state = &tile->split;
    __m512 scale = _mm512_set1_ps(a->scale * LOG2_E), old = _mm512_set1_ps(state->max[row]), x[4];
    __mmask16 seen[4];
    long last = tile->last[row] - block, first = first_visible_key(a, tile->position[row]) - block;
    for (int i = 0; i < 4; i++) {
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i key = _mm512_add_epi32(lane, _mm512_set1_epi32(i * 16));
        seen[i] = _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(last)) &
                  _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(first));
        x[i] = _mm512_load_ps(scores + row * BLOCK_KEYS + i * 16);
        if (scaled) x[i] = _mm512_mul_ps(x[i], _mm512_load_ps(scales->k + i * 16));
        if (capped) x[i] = bf16_tanh(_mm512_mul_ps(x[i], _mm512_set1_ps(a->cap_scale)));
        if (hide) x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(MASKED_SCORE), seen[i], x[i]);
    }
    float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
    __m512 max = _mm512_max_ps(old, _mm512_mul_ps(_mm512_set1_ps(top), scale));
    for (int i = 0; i < 4; i++) {
        x[i] = simd_exp2(_mm512_fmsub_ps(x[i], scale, max));
        if (hide) x[i] = _mm512_maskz_mov_ps(seen[i], x[i]);
    }
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
    for (int i = 0; i < 4 && scaled; i++) x[i] = _mm512_mul_ps(x[i], _mm512_load_ps(scales->v + i * 16));
    char *weights = (char *)tile->weights + row * BLOCK_KEYS * 2;
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
    _mm512_store_si512(weights + 64, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
    float rescale = _mm512_cvtss_f32(simd_exp2(_mm512_sub_ps(old, max)));
    state->max[row] = _mm512_cvtss_f32(max);
    state->sum[row] = state->sum[row] * rescale + sum;
    return rescale;
}

static void softmax_tile(const AttentionArgs *a, const float *scores, Tile *tile, long block, const Scales *scales,
                         float *rescale) {
    int all_seen =
        tile->last[0] >= block + BLOCK_KEYS - 1 && first_visible_key(a, tile->position[TILE_ROWS - 1]) <= block;
    for (int i = 0; i < tile->rows; i++)
        switch ((a->cap_scale > 0 ? 4 : 2 * !all_seen) + has_codes(a->kv_format)) {
            case 0: rescale[i] = softmax_row(a, scores, tile, i, block, scales, 0, 0, 0); break;
            case 1: rescale[i] = softmax_row(a, scores, tile, i, block, scales, 0, 1, 0); break;
            case 2: rescale[i] = softmax_row(a, scores, tile, i, block, scales, 1, 0, 0); break;
            case 3: rescale[i] = softmax_row(a, scores, tile, i, block, scales, 1, 1, 0); break;
            case 4: rescale[i] = softmax_row(a, scores, tile, i, block, scales, 1, 0, 1); break;
            default: rescale[i] = softmax_row(a, scores, tile, i, block, scales, 1, 1, 1);
        }
}

typedef struct {
    const char *const *pairs; /* [i]: the interleaved values of keys 2 * i and 2 * i + 1 */
    long from, to;            /* the pairs that at least one row of the tile sees: [from, to) */
    long row_stride;          /* elements from one output row to the next */
    Prefetch *prefetch;
} Values;

/* Computes out[rows][16 * columns] = out * rescale + weights times values. `at`: byte offset of the first column in a
 * pair. */
INLINE void accumulate_columns(const Values *v, long at, const int32_t *weights, float *out, const float *rescale,
                               const int columns, const int rows) {
    __m512 sum[MAX_ROWS_AT_ONCE][8];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++)
            sum[r][j] = _mm512_mul_ps(_mm512_load_ps(out + r * v->row_stride + j * 16), _mm512_set1_ps(rescale[r]));
    for (long i = v->from; i < v->to; i++) {
        const char *pair = v->pairs[i] + at;
        for (int j = 0; j < v->prefetch->pace * columns / 4; j++) prefetch_lines(v->prefetch, 2);
        __m512bh x[8];
        for (int j = 0; j < columns; j++) x[j] = (__m512bh)_mm512_loadu_si512(pair + j * 64);
        for (int r = 0; r < rows; r++) {
            __m512i weight = _mm512_set1_epi32(weights[r * (BLOCK_KEYS / 2) + i]);
            __asm__("" : "+v"(weight)); /* keeps gcc from loading the weight again for each column register */
            for (int j = 0; j < columns; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], (__m512bh)weight, x[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++) _mm512_store_ps(out + r * v->row_stride + j * 16, sum[r][j]);
}

/* Computes all columns of the outputs, as many at a time as registers allow. */
static void accumulate_rows(const Values *v, const int32_t *weights, float *out, const float *rescale, int rows) {
    for (long i = 0, left = v->row_stride / 16, n; left; i += n, left -= n) {
        n = left >= 8 && rows <= 3 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        switch (rows + n * 8) {
#define CASE(r, c) \
    case r + c * 8: accumulate_columns(v, i * 64, weights, out + i * 16, rescale, c, r); break;
#define CASES_UP_TO_3_ROWS(c) CASE(1, c) CASE(2, c) CASE(3, c)
#define CASES_UP_TO_6_ROWS(c) CASES_UP_TO_3_ROWS(c) CASE(4, c) CASE(5, c) CASE(6, c)
            CASES_UP_TO_3_ROWS(8) CASES_UP_TO_6_ROWS(4) CASES_UP_TO_6_ROWS(2) CASES_UP_TO_6_ROWS(1)
        }
    }
}

static void accumulate_values(const Values *v, Tile *tile, const float *rescale) {
    int parts = (tile->rows + MAX_ROWS_AT_ONCE - 1) / MAX_ROWS_AT_ONCE;
    for (int part = 0, row = 0, end; part < parts; part++, row = end) {
        end = (part + 1) * tile->rows / parts;
        const int32_t *weights = (const int32_t *)tile->weights + row * (BLOCK_KEYS / 2);
        accumulate_rows(v, weights, tile->split.out + row * v->row_stride, rescale + row, end - row);
    }
}

/* Computes the weights of all tiles first, then their outputs. So only the keys, and later only the values, must fit in
 * the L1 cache. */
static void attend_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tiles, int count, long block) {
    const KeyAddresses *p = &address_scratch(s)->here;
    const char *pairs[BLOCK_KEYS / 2], *keys[BLOCK_KEYS / 16];
    float rescale[MAX_ITEM_TILES][TILE_ROWS];
    long quarter = (tiles->head - item->head) * 4;
    Prefetch prefetch = plan_prefetch(a, s, item, quarter);
    const long pace = prefetch.pace;
    const Scales *scales = head_scales(a, s, tiles->head);
    if (a->kv_format == KV_TRANSPOSED) {
        locate_transposed(a, p, tiles->head, keys);
    } else {
        WITH_KV_FORMAT(transpose_keys, a, p, tiles->head * key_bytes(a), s->k, &prefetch)
        for (long i = 0; i < BLOCK_KEYS; i += 16) keys[i / 16] = transposed_keys(s->k, head_dim_steps(a) * 32, i);
        prefetch = plan_prefetch(a, s, item, quarter + 2);
    }
    for (int i = 0; i < count; i++, prefetch = no_prefetch(p)) {
        if (!sees_block(a, &tiles[i], block)) continue;
        score_tile(a, keys, &tiles[i], s->scores[0], &prefetch);
        softmax_tile(a, s->scores[0], &tiles[i], block, scales, rescale[i]);
    }
    locate_value_pairs(a, p, tiles->head, s->v, count > 1, pairs);
    prefetch = plan_prefetch(a, s, item, quarter + 4 - pace);
    Values v = {.pairs = pairs, .row_stride = pad_to_16(a->d), .prefetch = &prefetch};
    for (int i = 0; i < count; i++, prefetch = no_prefetch(p)) {
        if (!sees_block(a, &tiles[i], block)) continue;
        v.from = max_long(p->from, first_visible_key(a, tiles[i].position[0]) - block) / 2;
        v.to = (min_long(p->to, tiles[i].last[TILE_ROWS - 1] + 1 - block) + 1) / 2;
        accumulate_values(&v, &tiles[i], rescale[i]);
    }
}

__attribute__((visibility("default"))) int attention_bf16_avx512bf16(ATTENTION_PARAMETERS) {
    const long element_size = 2;
    AttentionArgs a = ATTENTION_ARGS;
    return run_attention(&a, threads);
}
