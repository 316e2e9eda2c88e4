/* bf16 attention on vdpbf16ps. The keys of a block are transposed, pairs of d down and keys across, so that a score is one
 * chain over pairs of d in a lane of its own; the weights, rounded to bf16 in pairs of keys, multiply values that lie in
 * pairs of keys, so that an output is one chain over the pairs of a block. Nothing is done for the 16 rows of a tile that
 * is not there: a decode pays for the heads of its group. */
#include "attention/attention_rows.h"

/* s->k: [D / 2 padded to 16][KEYS][2] of one head; s->v: [KEYS / 2][D padded to 16][2] of one head;
 * tile->q: [16][D padded to 32]; s->scores: [16][KEYS]; tile->weights: [16][KEYS] bf16 */

#define FEW 6 /* rows at a time, at most: by 4 registers of scores or of outputs; 3 rows by 8 of outputs */

/* Where a block's keys lie, those of head 0; beyond [from, to) some other's, whose scores nobody looks at. */
typedef struct {
    const char *keys[KEYS];
    long from, to; /* counted from the block's first */
} Place;

typedef struct {
    Scratch common;
    Place here, next; /* next: what is read after this block, */
    int next_head;    /* from this head on */
} Own;

static const char zeros[MOST_D * 4];

static Scratch *scratch_here(void) {
    static _Thread_local _Alignas(64) Own own;
    return &own.common;
}

INLINE Own *own(Scratch *s) { return (Own *)s; }

static void enter(void) { flush_tiny(1); }
static void leave(void) { flush_tiny(0); }

static void take_q(const AttentionArgs *a, Tile *tile, const Item *item) {
    long group = group_of(a), wide = steps_of(a) * 64;
    for (int i = 0; i < tile->rows; i++) {
        long row = tile->row + i, token = a->starts[item->seq] + row / group, head = tile->head * group + row % group;
        const bf16 *q = (const bf16 *)a->q + token * a->q_stride + head * a->d;
        for (long j = 0; j < a->d; j += 32)
            _mm512_store_si512(tile->q + i * wide + j * 2, _mm512_maskz_loadu_epi16(columns(a->d, j), q + j));
    }
}

static void find_keys(const AttentionArgs *a, Place *p, int seq, long block, long from, long to) {
    long row = a->kv_heads * a->d * 2;
    for (long at = from, run; at < to; at += run) {
        const char *key = a->cache_k + slot_of(a, seq, at, &run) * row;
        run = least(run, to - at);
        for (long i = 0; i < run; i++) p->keys[at - block + i] = key + i * row;
    }
    p->from = from - block, p->to = to - block;
    for (long i = 0; i < p->from; i++) p->keys[i] = p->keys[p->from];
    for (long i = p->to; i < KEYS; i++) p->keys[i] = p->keys[p->from];
}

/* Only notes where they are: they are read head by head, into the first-level cache. */
static void take_block(const AttentionArgs *a, Scratch *s, const Item *item, long block, long from, long to) {
    long next = block + KEYS, end = least(last_key(a, item), (item->span + item->spans) * SPAN);
    find_keys(a, &own(s)->here, item->seq, block, from, to);
    if (next >= end && s->then) {
        item = s->then;
        next = first_block(a, item, item->span), end = last_key(a, item);
    }
    own(s)->next_head = item->head;
    if (next < end) find_keys(a, &own(s)->next, item->seq, next, next, least(next + KEYS, end));
    else own(s)->next = own(s)->here;
}

#define GRAIN 128 /* bytes asked for in one go */

/* While a head is worked on, its share of the next block is asked for, all heads of a key together: the processor sees
 * memory read in the order in which it lies, at an even pace, and looks ahead further than we could. */
typedef struct {
    const Place *place;
    long first;      /* key */
    ptrdiff_t skip;  /* from a key to what is asked for */
    int shift, mask; /* 1 << shift grains a key */
} Ahead;

/* One of 4 quarters a head: of the keys of all heads, then of the values. */
INLINE Ahead find_ahead(const AttentionArgs *a, Scratch *s, const Item *item, long quarter) {
    long grains = most(1, item->heads * a->d * 2 / GRAIN), shift = 63 - __builtin_clzl(grains), half = item->heads * 2;
    ptrdiff_t skip = own(s)->next_head * a->d * 2;
    if (quarter >= half) skip += a->cache_v - a->cache_k, quarter -= half;
    return (Ahead){&own(s)->next, quarter * KEYS / half, skip, shift, (1 << shift) - 1};
}

/* The i-th grain from there on. */
INLINE void ask(const Ahead *ahead, long i) {
    const char *key = ahead->place->keys[(ahead->first + (i >> ahead->shift)) % KEYS];
    for (long j = 0; j < GRAIN; j += 64) __builtin_prefetch(key + ahead->skip + (i & ahead->mask) * GRAIN + j, 0, 3);
}

static void take_keys(const AttentionArgs *a, const Place *p, long skip, char *to, const Ahead *ahead) {
    for (long i = p->from / 16 * 16; i < p->to; i += 16)
        for (long step = 0; step < steps_of(a); step++) {
            __mmask32 mask = columns(a->d, step * 32);
            __m512i rows[16];
            for (int j = 0; j < 16; j++) rows[j] = _mm512_maskz_loadu_epi16(mask, p->keys[i + j] + skip + step * 64);
            for (int j = 0; j < 8; j++) ask(ahead, (i / 16 * steps_of(a) + step) * 8 + j);
            transpose(rows);
            for (int j = 0; j < 16; j++) _mm512_store_si512(to + (step * 16 + j) * KEYS * 4 + i * 4, rows[j]);
        }
}

/* Whether the values of two neighbouring tokens lie in pairs (see native.py, which decides). */
INLINE int paired(const AttentionArgs *a) { return a->page_size % 32 == 0 && a->d % 32 == 0; }

/* Two rows of values side by side. */
static void pair_values(const char *even, const char *odd, char *to, long d) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (long i = 0; i < d; i += 32) {
        __m512i x = _mm512_maskz_loadu_epi16(columns(d, i), even + i * 2);
        __m512i y = _mm512_maskz_loadu_epi16(columns(d, i), odd + i * 2);
        _mm512_store_si512(to + i * 4, _mm512_permutex2var_epi16(x, low, y));
        if (i + 16 < d) _mm512_store_si512(to + i * 4 + 64, _mm512_permutex2var_epi16(x, high, y));
    }
}

/* A pair of which one key is missing: zeros there. */
static void half_pair(const char *pair, int odd, char *to, long d) {
    __mmask32 there = odd ? 0xaaaaaaaau : 0x55555555u;
    for (long i = 0; i < d; i += 16) _mm512_store_si512(to + i * 4, _mm512_maskz_loadu_epi16(there, pair + i * 4));
}

/* Where the pairs of a head's values are: in their pages if they lie there in pairs and are read but once. */
static void find_values(const AttentionArgs *a, const Place *p, long head, char *room, int often, const char **pairs) {
    long row = a->kv_heads * a->d * 2, bytes = padded(a->d) * 4;
    ptrdiff_t values = a->cache_v - a->cache_k;
    for (long i = p->from / 2; i < (p->to + 1) / 2; i++) {
        int even = 2 * i >= p->from, odd = 2 * i + 1 < p->to;
        char *to = room + i * bytes;
        pairs[i] = to;
        if (!paired(a)) {
            const char *x = even ? p->keys[2 * i] + values + head * a->d * 2 : zeros;
            const char *y = odd ? p->keys[2 * i + 1] + values + head * a->d * 2 : zeros;
            pair_values(x, y, to, a->d);
            continue;
        }
        const char *pair = (even ? p->keys[2 * i] : p->keys[2 * i + 1] - row) + values + head * a->d * 4;
        if (!even || !odd) half_pair(pair, !even, to, a->d);
        else if (often) memcpy(to, pair, bytes);
        else pairs[i] = pair;
    }
}

#define UP_TO_6(body, ...)                   \
    case 1: body(__VA_ARGS__, 1); break;     \
    case 2: body(__VA_ARGS__, 2); break;     \
    case 3: body(__VA_ARGS__, 3); break;     \
    case 4: body(__VA_ARGS__, 4); break;     \
    case 5: body(__VA_ARGS__, 5); break;     \
    case 6: body(__VA_ARGS__, 6); break;

/* scores[rows][KEYS] = q k^T */
INLINE void score_rows(const char *q, const char *keys, long steps, float *scores, const Ahead *ahead, const int rows) {
    __m512 sum[FEW][4];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) sum[r][j] = _mm512_setzero_ps();
    for (long i = 0; i < steps * 16; i++, keys += KEYS * 4, q += 4) {
        ask(ahead, i);
        __m512bh k[4];
        for (int j = 0; j < 4; j++) k[j] = (__m512bh)_mm512_load_si512(keys + j * 64);
        for (int r = 0; r < rows; r++) {
            __m512i pair = _mm512_set1_epi32(*(const int32_t *)(q + r * steps * 64));
            __asm__("" : "+v"(pair)); /* one load for all */
            for (int j = 0; j < 4; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], (__m512bh)pair, k[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 4; j++) _mm512_store_ps(scores + r * KEYS + j * 16, sum[r][j]);
}

static void score(const AttentionArgs *a, const char *keys, const Tile *tile, float *scores, const Ahead *ahead) {
    long steps = steps_of(a), parts = (tile->rows + FEW - 1) / FEW;
    for (long part = 0, row = 0, end; part < parts; part++, row = end) {
        end = (part + 1) * tile->rows / parts;
        const char *q = tile->q + row * steps * 64;
        switch (end - row) { UP_TO_6(score_rows, q, keys, steps, scores + row * KEYS, ahead) }
    }
}

/* A row's scores become weights, bf16; returns the factor on what was there before. */
INLINE float weigh_row(const AttentionArgs *a, const float *scores, Tile *tile, int row, long block, const int hide) {
    State *state = &tile->span;
    __m512 scale = _mm512_set1_ps(a->scale * 1.44269504f), old = _mm512_set1_ps(state->max[row]), x[4];
    __mmask16 seen[4];
    long last = tile->position[row] - block, first = first_key(a, tile->position[row]) - block;
    for (int i = 0; i < 4; i++) {
        const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __m512i key = _mm512_add_epi32(lane, _mm512_set1_epi32(i * 16));
        seen[i] = _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(last)) &
                  _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(first));
        x[i] = _mm512_load_ps(scores + row * KEYS + i * 16);
        if (hide) x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(NOTHING), seen[i], x[i]);
    }
    float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])));
    __m512 max = _mm512_max_ps(old, _mm512_mul_ps(_mm512_set1_ps(top), scale));
    for (int i = 0; i < 4; i++) {
        x[i] = exp2_lanes(_mm512_fmsub_ps(x[i], scale, max));
        if (hide) x[i] = _mm512_maskz_mov_ps(seen[i], x[i]);
    }
    char *weights = (char *)tile->weights + row * KEYS * 2;
    _mm512_store_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
    _mm512_store_si512(weights + 64, (__m512i)_mm512_cvtne2ps_pbh(x[3], x[2]));
    float sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
    float shrink = _mm512_cvtss_f32(exp2_lanes(_mm512_sub_ps(old, max)));
    state->max[row] = _mm512_cvtss_f32(max);
    state->sum[row] = state->sum[row] * shrink + sum;
    return shrink;
}

static void weigh(const AttentionArgs *a, const float *scores, Tile *tile, long block, float *shrink) {
    int all_seen = tile->position[0] >= block + KEYS - 1 && first_key(a, tile->position[ROWS - 1]) <= block;
    for (int i = 0; i < tile->rows; i++)
        shrink[i] = all_seen ? weigh_row(a, scores, tile, i, block, 0) : weigh_row(a, scores, tile, i, block, 1);
}

typedef struct {
    const char *const *pairs; /* of values, */
    long from, to;            /* those that any row of a tile sees: others would add nothing; */
    long wide;                /* an output's row */
    Ahead ahead;
} Values;

/* out[rows][16 * columns] = out * shrink + weights times values; `at`: the first column's byte in a pair */
INLINE void add_part(const Values *v, long at, const int32_t *weights, float *out, const float *shrink, const int columns,
                     const int rows) {
    __m512 sum[FEW][8];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++)
            sum[r][j] = _mm512_mul_ps(_mm512_load_ps(out + r * v->wide + j * 16), _mm512_set1_ps(shrink[r]));
    for (long i = v->from; i < v->to; i++) {
        const char *pair = v->pairs[i] + at;
        for (int j = 0; j < 2; j++) ask(&v->ahead, i * 2 + j);
        __m512bh x[8];
        for (int j = 0; j < columns; j++) x[j] = (__m512bh)_mm512_loadu_si512(pair + j * 64);
        for (int r = 0; r < rows; r++) {
            __m512i weight = _mm512_set1_epi32(weights[r * (KEYS / 2) + i]);
            __asm__("" : "+v"(weight)); /* one load for all */
            for (int j = 0; j < columns; j++) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], (__m512bh)weight, x[j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++) _mm512_store_ps(out + r * v->wide + j * 16, sum[r][j]);
}

/* As many columns at once as there are registers for. */
static void add_rows(const Values *v, const int32_t *weights, float *out, const float *shrink, int rows) {
    for (long i = 0, left = v->wide / 16, n; left; i += n, left -= n) {
        n = left >= 8 && rows <= 3 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        switch (rows + n * 8) {
#define CASE(r, c) case r + c * 8: add_part(v, i * 64, weights, out + i * 16, shrink, c, r); break;
#define CASES(c) CASE(1, c) CASE(2, c) CASE(3, c)
#define ALL(c) CASES(c) CASE(4, c) CASE(5, c) CASE(6, c)
            CASES(8) ALL(4) ALL(2) ALL(1)
        }
    }
}

static void add_values(const Values *v, Tile *tile, const float *shrink) {
    int parts = (tile->rows + FEW - 1) / FEW;
    for (int part = 0, row = 0, end; part < parts; part++, row = end) {
        end = (part + 1) * tile->rows / parts;
        const int32_t *weights = (const int32_t *)tile->weights + row * (KEYS / 2);
        add_rows(v, weights, tile->span.out + row * v->wide, shrink + row, end - row);
    }
}

/* First the weights of all tiles, then their values, so that keys, then values, stay in the first-level cache. */
static void attend_block(const AttentionArgs *a, Scratch *s, const Item *item, Tile *tiles, int count, long block) {
    const Place *p = &own(s)->here;
    const Ahead nothing = {p, 0, 0, 31, 0};
    const char *pairs[KEYS / 2];
    float shrink[ITEM_TILES][ROWS];
    long quarter = (tiles->head - item->head) * 4;
    Ahead ahead = find_ahead(a, s, item, quarter);
    take_keys(a, p, tiles->head * a->d * 2, s->k, &ahead);
    ahead = find_ahead(a, s, item, quarter + 2);
    for (int i = 0; i < count; i++, ahead = nothing) {
        if (!in_sight(a, &tiles[i], block)) continue;
        score(a, s->k, &tiles[i], s->scores[0], &ahead);
        weigh(a, s->scores[0], &tiles[i], block, shrink[i]);
    }
    find_values(a, p, tiles->head, s->v, count > 1, pairs);
    Values v = {.pairs = pairs, .wide = padded(a->d), .ahead = find_ahead(a, s, item, quarter + 3)};
    for (int i = 0; i < count; i++, v.ahead = nothing) {
        if (!in_sight(a, &tiles[i], block)) continue;
        v.from = most(p->from, first_key(a, tiles[i].position[0]) - block) / 2;
        v.to = (least(p->to, tiles[i].position[ROWS - 1] + 1 - block) + 1) / 2;
        add_values(&v, &tiles[i], shrink[i]);
    }
}

__attribute__((visibility("default"))) int attention_bf16_avx512bf16(ATTENTION_PARAMETERS) {
    const long element = 2;
    AttentionArgs a = ATTENTION_ARGS;
    return run_attention(&a, threads);
}
