/* bf16 attention on AMX tiles: scores transposed (keys down, 16 rows of q across), so that the maximum and the sum of a
 * row run down lanes; the weights, rounded to bf16 and transposed back, multiply the values. */
#include "attention/attention_rows.h"
#include "attention/prefetch.h"
#include "amx_tiles.h"

/* k: [KEYS][D padded to 32]; v: [KEYS / 32][D / 16 tiles][16 pairs of keys][16][2]; q: [D / 32][16 pairs][16 rows][2] */

static Scratch *scratch_here(void) {
    static _Thread_local _Alignas(64) Scratch scratch;
    return &scratch;
}

static void enter(void) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = 16;
    tiles_shape(&shapes);
    flush_tiny(1);
}

static void leave(void) {
    flush_tiny(0);
    tiles_release();
}

static void take_q(const AttentionArgs *a, Tile *tile, const Item *item) {
    long group = group_of(a);
    for (long step = 0; step < steps_of(a); step++) {
        __m512i rows[16];
        for (int i = 0; i < 16; i++) {
            long row = tile->row + i, token = a->starts[item->seq] + row / group;
            long head = tile->head * group + row % group;
            const bf16 *q = (const bf16 *)a->q + token * a->q_stride + head * a->d + step * 32;
            __builtin_prefetch(q + 16 / group * a->q_stride, 0, 3); /* the next tile's */
            rows[i] = i < tile->rows ? _mm512_maskz_loadu_epi16(columns(a->d, step * 32), q) : _mm512_setzero_si512();
        }
        transpose(rows);
        for (int i = 0; i < 16; i++) _mm512_store_si512(tile->q + step * 1024 + i * 64, rows[i]);
    }
}

static void take_keys(const bf16 *from, bf16 *to, long d) {
    for (long i = 0; i < d; i += 32)
        _mm512_store_si512(to + i, _mm512_maskz_loadu_epi16(columns(d, i), from + i));
}

/* Two rows of values become row `pair` of the tiles of their 32 keys; a missing row is zeros. */
static void take_values(const bf16 *even, const bf16 *odd, char *tiles, long d) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (long i = 0; i < d; i += 32, tiles += 2048) {
        __mmask32 mask = columns(d, i);
        __m512i a = _mm512_maskz_loadu_epi16(even ? mask : 0, even + i);
        __m512i b = _mm512_maskz_loadu_epi16(odd ? mask : 0, odd + i);
        _mm512_store_si512(tiles, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(tiles + 1024, _mm512_permutex2var_epi16(a, high, b));
    }
}

static long head_bytes(const AttentionArgs *a) { return KEYS * steps_of(a) * 64; }

/* Whether the values of two neighbouring tokens lie in pairs, as the tiles want them (see native.py, which decides). */
INLINE int paired(const AttentionArgs *a) { return a->page_size % 32 == 0 && a->d % 32 == 0; }

/* The same from pairs: rows[i] is where key i's would be if it stood alone; what is missing becomes zeros. */
static void take_pairs(const AttentionArgs *a, Scratch *s, const Item *item, const bf16 *const *rows, long each) {
    long wide = steps_of(a) * 32, row = a->kv_heads * a->d;
    for (long i = 0; i < KEYS; i += 2) {
        char *tiles = s->v + i / 32 * wide * 64 + i % 32 / 2 * 64;
        __mmask32 there = (rows[i] ? 0x55555555u : 0) | (rows[i + 1] ? 0xaaaaaaaau : 0);
        const bf16 *pair = rows[i] ? rows[i] : rows[i + 1] ? rows[i + 1] - row : (const bf16 *)a->cache_v;
        pair += item->head * a->d; /* a pair's heads are twice as long */
        for (int h = 0; h < item->heads; h++, tiles += each, pair += 2 * a->d)
            for (long j = 0; j < a->d; j += 16)
                _mm512_store_si512(tiles + j * 64, _mm512_maskz_loadu_epi16(there, pair + 2 * j));
    }
}

static void take_block(const AttentionArgs *a, Scratch *s, const Item *item, long block, long from, long to) {
    const bf16 *values[KEYS] = {0};
    /* One tile a head reads a whole block just once: straight from its pages. What is missing must be zeros, though. */
    s->taken = !paired(a) || to - from < KEYS || item->rows > ROWS;
    if (!s->taken) return;
    long wide = steps_of(a) * 32, row = a->kv_heads * a->d, each = head_bytes(a);
    for (long at = from, run; at < to; at += run) {
        size_t first = slot_of(a, item->seq, at, &run) * row + item->head * a->d;
        run = least(run, to - at);
        for (long i = 0; i < run; i++) {
            const bf16 *k = (const bf16 *)a->cache_k + first + i * row;
            char *key = s->k + (at - block + i) * wide * 2;
            for (int h = 0; h < item->heads; h++) take_keys(k + h * a->d, (bf16 *)(key + h * each), a->d);
            values[at - block + i] = (const bf16 *)a->cache_v + first + i * row;
        }
    }
    if (paired(a)) take_pairs(a, s, item, values, each);
    for (long i = 0; i < KEYS && !paired(a); i += 2) {
        char *tiles = s->v + i / 32 * wide * 64 + i % 32 / 2 * 64;
        for (int h = 0; h < item->heads; h++, tiles += each) {
            const bf16 *even = values[i], *odd = values[i + 1];
            take_values(even ? even + h * a->d : NULL, odd ? odd + h * a->d : NULL, tiles, a->d);
        }
    }
}

/* Where a tile's block lies: copied head by head, or whole in its pages, from which tiles can be loaded. */
typedef struct {
    const char *k[4];        /* of each 16 keys */
    const char *v[2];        /* of each 32 keys */
    long k_stride, v_stride; /* from key to key, from pair to pair */
    long v_column;           /* from 16 columns of the values to the next */
} Place;

static Place copied(const AttentionArgs *a, const Scratch *s, long skip) {
    long stride = steps_of(a) * 64;
    Place p = {.k_stride = stride, .v_stride = 64, .v_column = 1024};
    for (int i = 0; i < 4; i++) p.k[i] = s->k + skip + i * 16 * stride;
    for (int i = 0; i < 2; i++) p.v[i] = s->v + skip + i * steps_of(a) * 2048;
    return p;
}

static Place in_pages(const AttentionArgs *a, const Item *item, int head, long block) {
    long row = a->kv_heads * a->d * 2, run;
    Place p = {.k_stride = row, .v_stride = 2 * row, .v_column = 64};
    for (int i = 0; i < 2; i++) {
        size_t at = slot_of(a, item->seq, block + 32 * i, &run) * row;
        p.k[2 * i] = a->cache_k + at + head * a->d * 2;
        p.k[2 * i + 1] = p.k[2 * i] + 16 * row;
        p.v[i] = a->cache_v + at + head * a->d * 4;
    }
    return p;
}

/* scores[KEYS][16] = k q^T */
static void score(const AttentionArgs *a, const Place *p, const Tile *tile, float *scores) {
    long steps = steps_of(a), stride = p->k_stride;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (long step = 0; step < steps; step++) {
        TILE_LOAD(5, tile->q + step * 1024, 64);
        TILE_LOAD(4, p->k[0] + step * 64, stride);
        TILE_LOAD(6, p->k[1] + step * 64, stride);
        TILE_DOT(0, 4, 5);
        TILE_LOAD(4, p->k[2] + step * 64, stride);
        TILE_DOT(1, 6, 5);
        TILE_LOAD(6, p->k[3] + step * 64, stride);
        TILE_DOT(2, 4, 5);
        TILE_DOT(3, 6, 5);
    }
    TILE_STORE(0, scores, 64);
    TILE_STORE(1, scores + 256, 64);
    TILE_STORE(2, scores + 512, 64);
    TILE_STORE(3, scores + 768, 64);
}

/* Which of 16 rows may see the key at a position. */
typedef struct {
    __m512i last, first;
} Sight;

INLINE __mmask16 sees(const Sight *sight, int key) {
    __m512i at = _mm512_set1_epi32(key);
    return _mm512_cmple_epi32_mask(at, sight->last) & _mm512_cmpge_epi32_mask(at, sight->first);
}

INLINE __m512 unseen_hidden(const float *scores, const Sight *sight, long i, int block, int hide) {
    __m512 x = _mm512_load_ps(scores + i * 16);
    return hide ? _mm512_mask_mov_ps(_mm512_set1_ps(NOTHING), sees(sight, block + i), x) : x;
}

INLINE __m512 highest(const float *scores, const Sight *sight, long block, int hide) {
    __m512 top[4] = {_mm512_set1_ps(NOTHING), _mm512_set1_ps(NOTHING), _mm512_set1_ps(NOTHING), _mm512_set1_ps(NOTHING)};
    for (long i = 0; i < KEYS; i += 4)
        for (int j = 0; j < 4; j++) top[j] = _mm512_max_ps(top[j], unseen_hidden(scores, sight, i + j, block, hide));
    return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

/* bf16 of two keys' weights, side by side a row. */
INLINE __m512i pair(__m512 even, __m512 odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

/* Scores become weights, [KEYS / 32][16 rows][32 keys] bf16; returns the factor on what was there before. */
INLINE __m512 weigh(const AttentionArgs *a, const float *scores, Tile *tile, const Sight *sight, long block, const int hide) {
    State *state = &tile->span;
    __m512 scale = _mm512_set1_ps(a->scale * 1.44269504f), old = _mm512_load_ps(state->max);
    __m512 max = _mm512_max_ps(old, _mm512_mul_ps(highest(scores, sight, block, hide), scale));
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (long half = 0; half < KEYS; half += 32) {
        __m512i rows[16];
        for (long i = half; i < half + 32; i += 2) {
            __m512 p[2];
            for (int j = 0; j < 2; j++) {
                __m512 y = exp2_lanes(_mm512_fmsub_ps(_mm512_load_ps(scores + (i + j) * 16), scale, max));
                p[j] = hide ? _mm512_maskz_mov_ps(sees(sight, block + i + j), y) : y;
                sums[j] = _mm512_add_ps(sums[j], p[j]);
            }
            rows[(i - half) / 2] = pair(p[0], p[1]);
        }
        transpose(rows);
        for (int i = 0; i < 16; i++) _mm512_store_si512((char *)tile->weights + half * 32 + i * 64, rows[i]);
    }
    __m512 shrink = exp2_lanes(_mm512_sub_ps(old, max));
    _mm512_store_ps(state->max, max);
    _mm512_store_ps(state->sum, _mm512_fmadd_ps(_mm512_load_ps(state->sum), shrink, _mm512_add_ps(sums[0], sums[1])));
    return shrink;
}

static void shrink_rows(float *out, __m512 shrink, long wide) {
    __mmask16 changed = _mm512_cmp_ps_mask(shrink, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    float factor[16];
    _mm512_storeu_ps(factor, shrink);
    for (; changed; changed &= changed - 1) {
        int row = __builtin_ctz(changed);
        float *line = out + row * wide;
        for (long i = 0; i < wide; i += 16)
            _mm512_store_ps(line + i, _mm512_mul_ps(_mm512_load_ps(line + i), _mm512_set1_ps(factor[row])));
    }
}

/* out[16][wide] += weights times values */
static void add_values(const AttentionArgs *a, const Place *p, Tile *tile) {
    float *out = tile->span.out;
    long tiles = padded(a->d) / 16, stride = p->v_stride, next = p->v_column;
    TILE_LOAD(6, tile->weights, 64);
    TILE_LOAD(7, (const char *)tile->weights + 1024, 64);
    for (long i = 0; i < tiles; i += 2) {
        const char *v = p->v[0] + i * next, *w = p->v[1] + i * next;
        TILE_LOAD(0, out + i * 16, tiles * 64);
        TILE_LOAD(4, v, stride);
        TILE_DOT(0, 6, 4);
        TILE_LOAD(5, w, stride);
        if (i + 1 < tiles) {
            TILE_LOAD(1, out + i * 16 + 16, tiles * 64);
            TILE_LOAD(2, v + next, stride);
            TILE_DOT(1, 6, 2);
            TILE_LOAD(3, w + next, stride);
            TILE_DOT(1, 7, 3);
            TILE_STORE(1, out + i * 16 + 16, tiles * 64);
        }
        TILE_DOT(0, 7, 5);
        TILE_STORE(0, out + i * 16, tiles * 64);
    }
}

static __m512 weigh_tile(const AttentionArgs *a, const float *scores, Tile *tile, long block) {
    Sight sight = {.last = _mm512_load_si512(tile->position), .first = _mm512_setzero_si512()};
    if (a->window) sight.first = _mm512_sub_epi32(sight.last, _mm512_set1_epi32(a->window - 1));
    int all_seen = tile->position[0] >= block + KEYS - 1 && first_key(a, tile->position[15]) <= block;
    return all_seen ? weigh(a, scores, tile, &sight, block, 0) : weigh(a, scores, tile, &sight, block, 1);
}

/* First the weights of all tiles, then their values, so that keys, then values, stay in the first-level cache. While the
 * weights of a tile are worked out, the tiles multiply the next one's scores. */
static void attend_block(const AttentionArgs *a, Scratch *s, const Item *item, Tile *tiles, int count, long block) {
    __m512 shrink[ITEM_TILES];
    Tile *seeing[ITEM_TILES];
    int n = 0, part = (tiles->head - item->head) * count;
    Place p = s->taken ? copied(a, s, (tiles->head - item->head) * head_bytes(a)) : in_pages(a, item, tiles->head, block);
    for (int i = 0; i < count; i++)
        if (in_sight(a, &tiles[i], block)) seeing[n++] = &tiles[i];
    if (n) score(a, &p, seeing[0], s->scores[0]);
    for (int i = 0; i < n; i++) {
        if (i + 1 < n) score(a, &p, seeing[i + 1], s->scores[(i + 1) % 2]);
        ask_for_part(a, s, item, block, part + i, count * item->heads);
        shrink[i] = weigh_tile(a, s->scores[i % 2], seeing[i], block);
    }
    for (int i = 0; i < n; i++) {
        shrink_rows(seeing[i]->span.out, shrink[i], padded(a->d));
        add_values(a, &p, seeing[i]);
    }
}

__attribute__((visibility("default"))) int attention_bf16_amx(ATTENTION_PARAMETERS) {
    const long element = 2;
    AttentionArgs a = ATTENTION_ARGS;
    return run_attention(&a, threads);
}
