/* Products with codes that stand for integers of four bits, in tiles. Inputs become integers as in integer_rows.h, which
 * bf16 holds exactly. The sums of a group are less than 2^24 then (packed_weight.py sees to it), so tiles add exactly, and
 * every element has the bits of integer_few_rows.h.
 *
 * The sums of every group must leave the tiles. They wait in memory until all groups of a block of inputs are there, and
 * are added together while the tiles compute the next block: what tiles store cannot be read at once. */
#pragma once
#include "gemm/amx/amx_rows.h"
#include "gemm/integer/integer_few_rows.h"

/* A block of rows as integers in tiles: [rows / 32][k-steps][32 rows][32], and what 1 stands for: [blocks of inputs][rows]. */
typedef struct {
    char *tiles;
    float *scales;
    long rows, steps;
} IntegerTiles;

/* The sums of up to 32 rows for one block of inputs: [groups][4 tiles]. */
typedef struct {
    _Alignas(64) float sums[MAX_PARTS][32 * PANEL];
    const Weight *weight;
    const char *head;        /* of the first group */
    const float *input_sums; /* of the rows in the first group; those of the next are `stride` further */
    const float *scales;     /* of the rows, in this block of inputs */
    float *total;            /* [4 tiles] */
    long groups, stride, rows;
} BlockSums;

INLINE IntegerTiles integer_tiles(const Gemm *g, char *buffer, long rows) {
    long steps = ceil_div(g->k, 32);
    return (IntegerTiles){buffer, (float *)(buffer + ceil_div(rows, 32) * steps * K_STEP_BYTES), rows, steps};
}

static size_t integer_tiles_bytes(const Gemm *g, long rows) {
    return ceil_div(rows, 32) * ceil_div(g->k, 32) * K_STEP_BYTES + rows * count_parts(g->weight) * sizeof(float);
}

/* Returns 32 inputs as integers in bf16: the pairs of each octet, inputs i and i + 4. */
INLINE __m512i integers_of_step(const bf16 *x, float factor) {
    const __m512i numbers_of_pairs = _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16, 15,
                                                      11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    __m512 halves[2];
    for (int i = 0; i < 2; i++) {
        __m512 scaled = _mm512_mul_ps((__m512)load_bf16(x + i * 16), _mm512_set1_ps(factor));
        halves[i] = _mm512_maskz_roundscale_ps(factor ? 0xffff : 0, scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    return _mm512_permutexvar_epi16(numbers_of_pairs, (__m512i)_mm512_cvtne2ps_pbh(halves[1], halves[0]));
}

/* Converts a block of rows x [rows, K], with zeros beyond the rows and beyond K. */
static void convert_to_tiles(const Gemm *g, const bf16 *x, IntegerTiles to) {
    const Weight *w = g->weight;
    float unit = integer_unit(w), factor;
    for (long r = 0; r < ceil_div(to.rows, 32) * 32; r++, x += g->k) {
        char *at = to.tiles + r / 32 * to.steps * K_STEP_BYTES + r % 32 * 64, *end = at + to.steps * K_STEP_BYTES;
        float *scale = to.scales + r;
        for (IntegerBlock b = block_at(w, 0, 0); r < to.rows && b.from < w->k; b = block_after(w, b), scale += to.rows) {
            bf16 inputs[MAX_INTEGER_BLOCK] = {0};
            memcpy(inputs, x + b.from, min_long(b.count, w->k - b.from) * sizeof(bf16));
            *scale = block_scale(inputs, b.count, &factor) * unit;
            for (long k = 0; k < b.count; k += 32, at += K_STEP_BYTES)
                _mm512_store_si512(at, integers_of_step(inputs + k, factor));
        }
        for (; at < end; at += K_STEP_BYTES) _mm512_store_si512(at, _mm512_setzero_si512());
    }
}

/* Adds the sums of rows [from, to) to the total. `groups` and `has_minimum` are constants wherever this is inlined. */
INLINE void add_rows(const BlockSums *b, long from, long to, const long groups, const int has_minimum) {
    for (int half = 0; half < 2; half++) {
        vf scale[MAX_PARTS], minimum[MAX_PARTS];
        for (long i = 0; i < groups; i++) {
            scale[i] = load_scales(b->weight, b->head + i * group_bytes(b->weight), half * 16);
            if (has_minimum) minimum[i] = load_minimums(b->weight, b->head + i * group_bytes(b->weight), half * 16);
        }
        for (long r = from; r < to; r++) {
            long at = place_in_tiles(r, half);
            vf sum = broadcast(0);
            for (long i = 0; i < groups; i++) sum = simd_fma(load_f32(b->sums[i] + at), scale[i], sum);
            sum = simd_fma(sum, broadcast(b->scales[r]), load_f32(b->total + at));
            for (long i = 0; has_minimum && i < groups; i++)
                sum = simd_fma(broadcast(b->input_sums[i * b->stride + r]), minimum[i], sum);
            store_f32(b->total + at, sum);
        }
    }
}

/* Adds one of `pieces` pieces of a block of sums to the total. */
static void add_piece(const BlockSums *b, long piece, long pieces) {
    long from = b->rows * piece / pieces, to = b->rows * (piece + 1) / pieces;
    int has_minimum = b->weight->has_minimum;
    if (b->groups == 4)
        has_minimum ? add_rows(b, from, to, 4, 1) : add_rows(b, from, to, 4, 0);
    else
        has_minimum ? add_rows(b, from, to, b->groups, 1) : add_rows(b, from, to, b->groups, 0);
}

/* Computes the sums of a block of inputs for 32 rows or fewer. weight: its `steps` unpacked steps, `each` of them for a
 * group. Adds the sums of the block before, if there is one: piece by piece, between the products of two groups. */
INLINE void multiply_block(const RowLayout *x, const char *from, const char *weight, long steps, long each,
                           BlockSums *sums, const BlockSums *before, const int two_tiles) {
    long halves = sums->weight->group / CODE_BLOCK; /* of the k-steps of a group's inputs */
    for (long i = 0; i < sums->groups; i++, steps -= each, weight += each * K_STEP_BYTES) {
        multiply_chunk(x, from + i * halves / 2 * x->step_stride, weight, min_long(each, steps), NULL, sums->sums[i], 1,
                       weight, 0, two_tiles);
        if (before) add_piece(before, i, sums->groups);
    }
}

/* Computes one panel for a block of rows that starts at `row`. */
static void multiply_integers(const Gemm *g, const ThreadBuffers *buffers, long row, long rows, long panel) {
    static _Thread_local BlockSums blocks[2];
    const Weight *w = g->weight;
    IntegerTiles x = integer_tiles(g, buffers->rows, rows);
    RowLayout layout = {x.tiles, x.steps * K_STEP_BYTES, 64, K_STEP_BYTES};
    long spread = w->group == CODE_BLOCK, each = max_long(w->group / 32, 1), number = 0;
    BlockSums *before = NULL;
    memset(buffers->total, 0, ceil_div(rows, 32) * 32 * PANEL * sizeof(float));
    for (IntegerBlock b = block_at(w, 0, 0); b.from < w->k; b = block_after(w, b), x.scales += rows) {
        long steps = spread ? b.parts : ceil_div(b.count, 32);
        panel_pairs(w, panel, b.from / 32, ceil_div(b.count, 32), buffers->chunk, spread);
        for (long r = 0; r < rows; r += 32) {
            BlockSums *sums = &blocks[number++ % 2];
            sums->weight = w, sums->head = group_at(w, panel, b.group), sums->groups = b.parts;
            sums->input_sums = buffers->input_sums + b.group * rows + r, sums->stride = rows;
            sums->scales = x.scales + r, sums->total = buffers->total + r * PANEL, sums->rows = min_long(32, rows - r);
            const char *from = layout.base + r / 32 * layout.block_stride + b.from / 32 * K_STEP_BYTES;
            if (sums->rows > 16)
                multiply_block(&layout, from, buffers->chunk, steps, each, sums, before, 1);
            else
                multiply_block(&layout, from, buffers->chunk, steps, each, sums, before, 0);
            before = sums;
        }
    }
    add_piece(before, 0, 1);
    for (long r = 0; r < rows; r += 32) {
        const float *total = buffers->total + r * PANEL;
        if (g->t <= 32) {
            copy_from_tiles(total, rows, buffers->acc);
            keep_block(g, buffers->results, buffers->acc, 0, rows, panel);
        } else
            (can_bypass_caches(g) ? store_past_caches : store_tiles)(g, total, row + r, min_long(32, rows - r), panel);
    }
}
