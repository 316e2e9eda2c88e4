/* bf16 attention on AMX tiles. Scores are computed transposed: [keys][16 rows of q]. So the elements of a register
 * belong to different rows, and a row's maximum and sum need no operation across a register. The softmax weights are
 * rounded to bf16, transposed back and multiplied by the values. */
#define PREFETCH_LOCALITY 2 /* the L1 cache has no room for a block of all heads */
#include "bf16_rows.h"
#include "key_addresses.h"
#include "amx_tiles.h"

/* s->k: [BLOCK_KEYS][D padded to 32]; s->v: [BLOCK_KEYS / 32][D / 16 tiles][16 pairs of keys][16][2];
 * tile->q: [D / 32][16 pairs][16 rows][2] */

static void begin_work(void) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    tiles_configure(&config);
    flush_denormals(1);
}

static void end_work(void) {
    flush_denormals(0);
    tiles_release();
}

static void load_q(const AttentionArgs *a, Tile *tile, const WorkItem *item) {
    long group = group_size(a);
    bf16 buffers[16][MAX_HEAD_DIM];
    const bf16 *q[16];
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->query_start_loc[item->seq] + row / group;
        q[i] = (const bf16 *)a->q + token * a->q_stride + (tile->head * group + row % group) * a->d;
        for (long j = 0; j < a->d; j += 32) /* the rows of the next tile */
            __builtin_prefetch(q[i] + 16 / group * a->q_stride + j, 0, 3);
        q[i] = query_for_keys(a, q[i], buffers[i]);
    }
    for (long step = 0; step < head_dim_steps(a); step++) {
        __m512i rows[16];
        for (int i = 0; i < 16; i++)
            rows[i] = i < tile->rows ? _mm512_maskz_loadu_epi16(column_mask(a->d, step * 32), q[i] + step * 32)
                                     : _mm512_setzero_si512();
        transpose_16x16(rows);
        for (int i = 0; i < 16; i++) _mm512_store_si512(tile->q + step * 1024 + i * 64, rows[i]);
    }
}

INLINE void copy_keys(const char *from, char *to, long d, const int kv_format) {
    for (long i = 0; i < d; i += 32) _mm512_store_si512(to + i * 2, load_32(from, d, i, kv_format));
}

/* Interleaves the values of two keys into one row of the value tiles. The values of a missing key (NULL) become
 * zeros. */
INLINE void interleave_values(const char *even, const char *odd, char *tiles, long d, const int kv_format) {
    for (long i = 0; i < d; i += 32, tiles += 2048) {
        __m512i out[2];
        interleave_32(even, odd, d, i, out, kv_format);
        _mm512_store_si512(tiles, out[0]);
        _mm512_store_si512(tiles + 1024, out[1]);
    }
}

/* Returns the address of the values of key i at head 0, or NULL if the key is missing. */
INLINE const char *value_row(const KeyAddresses *p, long i) {
    return i >= p->from && i < p->to ? p->values[i] : NULL;
}

/* Copies a head's values, which are stored interleaved. Missing keys become zeros. */
static void copy_value_pairs(const AttentionArgs *a, const KeyAddresses *p, char *to, long head) {
    for (long i = 0; i < BLOCK_KEYS; i += 2) {
        const char *even = value_row(p, i), *odd = value_row(p, i + 1);
        char *tiles = to + i / 32 * head_dim_steps(a) * 2048 + i % 32 / 2 * 64;
        __mmask32 there = (even ? 0x55555555u : 0) | (odd ? 0xaaaaaaaau : 0);
        const char *pair = even ? even : odd ? odd - a->kv_heads * value_bytes(a) : a->cache_v;
        pair += head * a->d * 4; /* heads of an interleaved pair are twice as long */
        for (long j = 0; j < a->d; j += 16)
            _mm512_store_si512(tiles + j * 64, _mm512_maskz_loadu_epi16(there, pair + 4 * j));
    }
}

/* Copies the keys of a head. Also copies its values if they are not stored interleaved. */
INLINE void copy_rows(const AttentionArgs *a, Scratch *s, const KeyAddresses *p, long head, const int kv_format) {
    long stride = head_dim_steps(a) * 64, offset = head * value_bytes(a);
    for (long i = p->from; i < p->to; i++)
        copy_keys(p->keys[i] + head * key_bytes(a), s->k + i * stride, a->d, key_format(kv_format));
    for (long i = 0; i < BLOCK_KEYS && a->kv_format != KV_PAIRED; i += 2) {
        const char *even = value_row(p, i), *odd = value_row(p, i + 1);
        interleave_values(even ? even + offset : NULL, odd ? odd + offset : NULL,
                          s->v + i / 32 * stride * 32 + i % 32 / 2 * 64, a->d, kv_format);
    }
}

/* Copies one head's keys and values of the block to s->k and s->v, where they stay in the core's cache. */
static void copy_head(const AttentionArgs *a, Scratch *s, const KeyAddresses *p, long head) {
    WITH_KV_FORMAT(copy_rows, a, s, p, head)
    if (a->kv_format == KV_PAIRED) copy_value_pairs(a, p, s->v, head);
}

/* Returns whether a block is copied. A complete block is not copied if a head has a single tile, because it is then
 * read only once. An incomplete block is copied, because its missing keys must be zeros. */
static int is_copied(const AttentionArgs *a, const KeyAddresses *p, const WorkItem *item) {
    return a->kv_format != KV_PAIRED || p->to - p->from < BLOCK_KEYS || item->rows > TILE_ROWS;
}

/* The addresses from which AMX tiles of a block are loaded: either in a copy of one head, or in the pages. */
typedef struct {
    const char *k[4];        /* [i]: the address of keys 16 * i to 16 * i + 15 */
    const char *v[2];        /* [i]: the address of the values of keys 32 * i to 32 * i + 31 */
    long k_stride, v_stride; /* bytes from key to key, and from pair of values to pair of values */
    long v_column;           /* bytes from 16 columns of the values to the next 16 columns */
} TileAddresses;

static TileAddresses copied_block(const AttentionArgs *a, const Scratch *s) {
    long stride = head_dim_steps(a) * 64;
    TileAddresses p = {.k_stride = stride, .v_stride = 64, .v_column = 1024};
    for (int i = 0; i < 4; i++) p.k[i] = s->k + i * 16 * stride;
    for (int i = 0; i < 2; i++) p.v[i] = s->v + i * head_dim_steps(a) * 2048;
    return p;
}

static TileAddresses block_in_pages(const AttentionArgs *a, const WorkItem *item, int head, long block) {
    long row = a->kv_heads * a->d * 2, contiguous;
    TileAddresses p = {.k_stride = row, .v_stride = 2 * row, .v_column = 64};
    for (int i = 0; i < 2; i++) {
        size_t at = cache_slot(a, item->seq, block + 32 * i, &contiguous) * row;
        p.k[2 * i] = a->cache_k + at + head * a->d * 2;
        p.k[2 * i + 1] = p.k[2 * i] + 16 * row;
        p.v[i] = a->cache_v + at + head * a->d * 4;
    }
    return p;
}

/* Prefetches the few cache lines that are due at one load of an AMX tile, or at two keys of the softmax. A head
 * prefetches four quarters: one while it computes scores, two during the softmax, and one while it computes the
 * output. */
INLINE void prefetch_share(const AttentionArgs *a, Prefetch *prefetch) {
    if (prefetch) prefetch_lines(prefetch, (key_bytes(a) + 31) / 32);
}

/* Computes scores[BLOCK_KEYS][16] = k q^T. */
static void score_tile(const AttentionArgs *a, const TileAddresses *p, const Tile *tile, float *scores,
                       Prefetch *prefetch) {
    long steps = head_dim_steps(a), stride = p->k_stride;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (long step = 0; step < steps; step++) {
        TILE_LOAD(5, tile->q + step * 1024, 64);
        TILE_LOAD(4, p->k[0] + step * 64, stride);
        TILE_LOAD(6, p->k[1] + step * 64, stride);
        prefetch_share(a, prefetch);
        prefetch_share(a, prefetch);
        TILE_DOT(0, 4, 5);
        TILE_LOAD(4, p->k[2] + step * 64, stride);
        prefetch_share(a, prefetch);
        TILE_DOT(1, 6, 5);
        TILE_LOAD(6, p->k[3] + step * 64, stride);
        prefetch_share(a, prefetch);
        TILE_DOT(2, 4, 5);
        TILE_DOT(3, 6, 5);
    }
    TILE_STORE(0, scores, 64);
    TILE_STORE(1, scores + 256, 64);
    TILE_STORE(2, scores + 512, 64);
    TILE_STORE(3, scores + 768, 64);
}

/* For each of 16 rows, the range of keys that the row may see. */
typedef struct {
    __m512i last, first;
} VisibleKeys;

INLINE __mmask16 is_visible(const VisibleKeys *visible, int key) {
    __m512i at = _mm512_set1_epi32(key);
    return _mm512_cmple_epi32_mask(at, visible->last) & _mm512_cmpge_epi32_mask(at, visible->first);
}

INLINE __m512 masked_scores(const float *scores, const VisibleKeys *visible, long i, int block, int hide) {
    __m512 x = _mm512_load_ps(scores + i * 16);
    return hide ? _mm512_mask_mov_ps(_mm512_set1_ps(MASKED_SCORE), is_visible(visible, block + i), x) : x;
}

INLINE __m512 row_max(const float *scores, const VisibleKeys *visible, long block, int hide) {
    __m512 top[4] = {_mm512_set1_ps(MASKED_SCORE), _mm512_set1_ps(MASKED_SCORE), _mm512_set1_ps(MASKED_SCORE),
                     _mm512_set1_ps(MASKED_SCORE)};
    for (long i = 0; i < BLOCK_KEYS; i += 4)
        for (int j = 0; j < 4; j++) top[j] = _mm512_max_ps(top[j], masked_scores(scores, visible, i + j, block, hide));
    return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

/* Rounds the softmax weights of two keys, for 16 rows, to bf16, and interleaves the two keys. */
INLINE __m512i interleave_weights(__m512 even, __m512 odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

/* Online softmax: turns scores into bf16 weights [BLOCK_KEYS / 32][16 rows][32 keys]. Returns for each row the factor
 * by which its output so far must be multiplied. */
INLINE __m512 softmax(const AttentionArgs *a, const float *scores, Tile *tile, const VisibleKeys *visible, long block,
                      const Scales *scales, Prefetch *prefetch, const int hide, const int scaled) {
    SoftmaxState *state = &tile->split;
    __m512 scale = _mm512_set1_ps(a->scale * LOG2_E), old = _mm512_load_ps(state->max);
    __m512 max = _mm512_max_ps(old, _mm512_mul_ps(row_max(scores, visible, block, hide), scale));
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (long half = 0; half < BLOCK_KEYS; half += 32) {
        __m512i rows[16];
        for (long i = half; i < half + 32; i += 2) {
            __m512 p[2];
            for (int j = 0; j < 2; j++) {
                __m512 y = simd_exp2(_mm512_fmsub_ps(_mm512_load_ps(scores + (i + j) * 16), scale, max));
                p[j] = hide ? _mm512_maskz_mov_ps(is_visible(visible, block + i + j), y) : y;
                sums[j] = _mm512_add_ps(sums[j], p[j]);
                if (scaled) p[j] = _mm512_mul_ps(p[j], _mm512_set1_ps(scales->v[i + j]));
            }
            prefetch_share(a, prefetch);
            rows[(i - half) / 2] = interleave_weights(p[0], p[1]);
        }
        transpose_16x16(rows);
        for (int i = 0; i < 16; i++) _mm512_store_si512((char *)tile->weights + half * 32 + i * 64, rows[i]);
    }
    __m512 rescale = simd_exp2(_mm512_sub_ps(old, max));
    _mm512_store_ps(state->max, max);
    _mm512_store_ps(state->sum, _mm512_fmadd_ps(_mm512_load_ps(state->sum), rescale, _mm512_add_ps(sums[0], sums[1])));
    return rescale;
}

static void rescale_rows(float *out, __m512 rescale, long padded_d) {
    __mmask16 changed = _mm512_cmp_ps_mask(rescale, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    float factor[16];
    _mm512_storeu_ps(factor, rescale);
    for (; changed; changed &= changed - 1) {
        int row = __builtin_ctz(changed);
        float *line = out + row * padded_d;
        for (long i = 0; i < padded_d; i += 16)
            _mm512_store_ps(line + i, _mm512_mul_ps(_mm512_load_ps(line + i), _mm512_set1_ps(factor[row])));
    }
}

/* Computes out[16][padded_d] += weights times values. */
static void accumulate_values(const AttentionArgs *a, const TileAddresses *p, Tile *tile, Prefetch *prefetch) {
    float *out = tile->split.out;
    long tiles = pad_to_16(a->d) / 16, stride = p->v_stride, next = p->v_column;
    TILE_LOAD(6, tile->weights, 64);
    TILE_LOAD(7, (const char *)tile->weights + 1024, 64);
    for (long i = 0; i < tiles; i += 2) {
        const char *v = p->v[0] + i * next, *w = p->v[1] + i * next;
        TILE_LOAD(0, out + i * 16, tiles * 64);
        TILE_LOAD(4, v, stride);
        prefetch_share(a, prefetch);
        TILE_DOT(0, 6, 4);
        TILE_LOAD(5, w, stride);
        prefetch_share(a, prefetch);
        if (i + 1 < tiles) {
            TILE_LOAD(1, out + i * 16 + 16, tiles * 64);
            TILE_LOAD(2, v + next, stride);
            prefetch_share(a, prefetch);
            TILE_DOT(1, 6, 2);
            TILE_LOAD(3, w + next, stride);
            prefetch_share(a, prefetch);
            TILE_DOT(1, 7, 3);
            TILE_STORE(1, out + i * 16 + 16, tiles * 64);
        }
        TILE_DOT(0, 7, 5);
        TILE_STORE(0, out + i * 16, tiles * 64);
    }
}

/* Multiplies scores[BLOCK_KEYS][16] by the scales of the keys. */
static void scale_scores(float *scores, const Scales *scales) {
    for (long i = 0; i < BLOCK_KEYS; i++) {
        __m512 scaled = _mm512_mul_ps(_mm512_load_ps(scores + i * 16), _mm512_set1_ps(scales->k[i]));
        _mm512_store_ps(scores + i * 16, scaled);
    }
}

static void cap_scores(const AttentionArgs *a, float *scores) {
    __m512 scale = _mm512_set1_ps(a->cap_scale);
    for (long i = 0; i < BLOCK_KEYS * 16; i += 16)
        _mm512_store_ps(scores + i, bf16_tanh(_mm512_mul_ps(_mm512_load_ps(scores + i), scale)));
}

static __m512 softmax_tile(const AttentionArgs *a, float *scores, Tile *tile, long block, const Scales *scales,
                           Prefetch *prefetch) {
    VisibleKeys visible = {.last = _mm512_load_si512(tile->last), .first = _mm512_setzero_si512()};
    __m512i position = _mm512_load_si512(tile->position);
    if (a->window) visible.first = _mm512_sub_epi32(position, _mm512_set1_epi32(a->window - 1));
    int all_seen = tile->last[0] >= block + BLOCK_KEYS - 1 && first_visible_key(a, tile->position[15]) <= block;
    if (has_codes(a->kv_format)) scale_scores(scores, scales);
    if (a->cap_scale > 0) cap_scores(a, scores);
    if (has_codes(a->kv_format))
        return all_seen ? softmax(a, scores, tile, &visible, block, scales, prefetch, 0, 1)
                        : softmax(a, scores, tile, &visible, block, scales, prefetch, 1, 1);
    return all_seen ? softmax(a, scores, tile, &visible, block, scales, prefetch, 0, 0)
                    : softmax(a, scores, tile, &visible, block, scales, prefetch, 1, 0);
}

/* Computes the weights of all tiles first, then their outputs. So only the keys, and later only the values, must fit in
 * the L1 cache. AMX computes the scores of the next tile while the softmax of the current tile runs in SIMD
 * registers. */
static void attend_block(const AttentionArgs *a, Scratch *s, const WorkItem *item, Tile *tiles, int count, long block) {
    const KeyAddresses *here = &address_scratch(s)->here;
    __m512 rescale[MAX_ITEM_TILES];
    Tile *visible_tiles[MAX_ITEM_TILES];
    const Scales *scales = head_scales(a, s, tiles->head);
    int n = 0, copied = is_copied(a, here, item);
    Prefetch prefetch = plan_prefetch(a, s, item, (tiles->head - item->head) * 4);
    if (copied) copy_head(a, s, here, tiles->head);
    TileAddresses p = copied ? copied_block(a, s) : block_in_pages(a, item, tiles->head, block);
    for (int i = 0; i < count; i++)
        if (sees_block(a, &tiles[i], block)) visible_tiles[n++] = &tiles[i];
    if (n) score_tile(a, &p, visible_tiles[0], s->scores[0], &prefetch);
    for (int i = 0; i < n; i++) {
        if (i + 1 < n) score_tile(a, &p, visible_tiles[i + 1], s->scores[(i + 1) % 2], NULL);
        rescale[i] = softmax_tile(a, s->scores[i % 2], visible_tiles[i], block, scales, i ? NULL : &prefetch);
    }
    for (int i = 0; i < n; i++) {
        rescale_rows(visible_tiles[i]->split.out, rescale[i], pad_to_16(a->d));
        accumulate_values(a, &p, visible_tiles[i], i ? NULL : &prefetch);
    }
}

__attribute__((visibility("default"))) int attention_bf16_amx(ATTENTION_PARAMETERS) {
    const long element_size = 2;
    AttentionArgs a = ATTENTION_ARGS;
    return run_attention(&a, threads);
}
