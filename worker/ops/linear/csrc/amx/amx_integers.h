/* Products in AMX tiles with codes that stand for integers. Inputs are converted to integers as in integer_rows.h; bf16
 * represents these integers exactly. The sums of a group are less than 2^24 (linear/native.py makes sure of that), so
 * tiles add exactly, and every element has the same bits as in integer_few_rows.h.
 *
 * The sums of every group are stored from the tiles. They stay in the L1 cache until all groups of a block of inputs
 * are computed. Adding them together loads and stores the total only once, and data that tiles stored cannot be read at
 * once. */
#pragma once
#include "amx_overlap.h"
#include "integer_few_rows.h"

/* A block of rows as integers. tiles: [rows / 32][k-steps][32 rows][32]; scales: [blocks of inputs][rows]. */
typedef struct {
    char *tiles;
    float *scales;
    long rows, steps;
} IntegerTiles;

/* The sums of up to 32 rows for one block of inputs: [groups][4 tiles]. */
typedef struct {
    _Alignas(64) float of[MAX_PARTS][32 * PANEL];
    const Weight *weight;
    const char *head;        /* the scales and minimums of the first group */
    const float *input_sums; /* the sum of each row's inputs in the first group; groups are `stride` floats apart */
    const float *scales;     /* the scale of each row in this block of inputs */
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

/* Returns 32 inputs as integers in bf16, in pairs of the inputs i and i + 4 of each octet. */
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

/* Converts a block of rows x [rows, K] to integers in tiles, with zeros beyond the last row and beyond K. */
static void convert_to_tiles(const Gemm *g, const bf16 *x, IntegerTiles to) {
    const Weight *w = g->weight;
    float unit = integer_unit(w), factor;
    for (long r = 0; r < ceil_div(to.rows, 32) * 32; r++, x += g->k) {
        char *at = to.tiles + r / 32 * to.steps * K_STEP_BYTES + r % 32 * 64, *end = at + to.steps * K_STEP_BYTES;
        float *scale = to.scales + r;
        for (IntegerBlock b = block_at(w, 0, 0); r < to.rows && b.from < w->k; b = block_after(w, b), scale += to.rows) {
            bf16 inputs[MAX_INTEGER_BLOCK] = {0};
            memcpy(inputs, x + b.from, min_long(b.count, w->k - b.from) * sizeof(bf16));
            *scale = block_scale(inputs, b.count, dropped_bits(w), &factor) * unit;
            for (long k = 0; k < b.count; k += 32, at += K_STEP_BYTES)
                _mm512_store_si512(at, integers_of_step(inputs + k, factor));
        }
        for (; at < end; at += K_STEP_BYTES) _mm512_store_si512(at, _mm512_setzero_si512());
    }
}

/* Scales the sums of all groups in one tile, and adds them to the total. */
INLINE void add_tile(const BlockSums *b, long tile, const long groups, const int has_minimum) {
    vf scale[MAX_PARTS], minimum[MAX_PARTS];
    for (long i = 0; i < groups; i++) {
        const char *head = b->head + i * group_bytes(b->weight);
        scale[i] = load_scales(b->weight, head, tile % 2 * 16);
        if (has_minimum) minimum[i] = load_minimums(b->weight, head, tile % 2 * 16);
    }
    long first = tile / 2 * 16, rows = min_long(b->rows - first, 16), stride = b->stride;
    const float *sums = b->of[0] + tile * 256, *scales = b->scales + first, *input_sums = b->input_sums + first;
    float *total = b->total + tile * 256;
    for (long r = 0; r < rows; r++, sums += 16, total += 16) {
        vf sum = broadcast(0);
        for (long i = 0; i < groups; i++) sum = simd_fma(load_f32(sums + i * 32 * PANEL), scale[i], sum);
        sum = simd_fma(sum, broadcast(scales[r]), load_f32(total));
        for (long i = 0; has_minimum && i < groups; i++)
            sum = simd_fma(broadcast(input_sums[i * stride + r]), minimum[i], sum);
        store_f32(total, sum);
    }
}

static void add_sums(const BlockSums *b) {
    int has_minimum = b->weight->has_minimum;
    for (long tile = 0; tile < (b->rows > 16 ? 4 : 2); tile++)
        if (b->groups == 4)
            has_minimum ? add_tile(b, tile, 4, 1) : add_tile(b, tile, 4, 0);
        else
            has_minimum ? add_tile(b, tile, b->groups, 1) : add_tile(b, tile, b->groups, 0);
}

/* Computes the sums of a block of inputs for up to 32 rows. weight: the block's `steps` unpacked steps; each: steps of
 * a group. */
INLINE void multiply_groups(const RowLayout *x, const char *from, const char *weight, long steps, long each,
                            BlockSums *sums, const int two_tiles) {
    long half_steps = sums->weight->group / CODE_BLOCK; /* half k-steps of the rows in each group */
    for (long i = 0; i < sums->groups; i++, steps -= each, weight += each * K_STEP_BYTES)
        multiply_chunk(x, from + i * half_steps / 2 * x->step_stride, weight, min_long(each, steps), NULL, sums->of[i], 1,
                       weight, 0, two_tiles);
}

/* Computes one panel for a block of rows that starts at `row`. */
static void multiply_integers(const Gemm *g, const ThreadBuffers *buffers, long row, long rows, long panel) {
    const Weight *w = g->weight;
    IntegerTiles x = integer_tiles(g, buffers->rows, rows);
    RowLayout layout = {x.tiles, x.steps * K_STEP_BYTES, 64, K_STEP_BYTES};
    long spread = w->group == CODE_BLOCK, each = max_long(w->group / 32, 1);
    BlockSums sums;
    sums.weight = w, sums.stride = rows;
    memset(buffers->total, 0, ceil_div(rows, 32) * 32 * PANEL * sizeof(float));
    for (IntegerBlock b = block_at(w, 0, 0); b.from < w->k; b = block_after(w, b), x.scales += rows) {
        long steps = spread ? b.parts : ceil_div(b.count, 32);
        panel_pairs(w, panel, b.from / 32, ceil_div(b.count, 32), buffers->chunk, spread);
        sums.head = group_at(w, panel, b.group), sums.groups = b.parts;
        Overlapped *overlapped = overlapped_for(w, b);
        long begin = overlapped ? rows / 32 * 32 : 0; /* the remaining rows begin here */
        if (begin)
            overlapped((Overlap){.x = x.tiles + b.from / 32 * K_STEP_BYTES, .weight = buffers->chunk, .scales = x.scales,
                                 .input_sums = buffers->input_sums + b.group * rows, .total = buffers->total,
                                 .stride = rows},
                       w, sums.head, layout.block_stride, begin);
        for (long r = begin; r < rows; r += 32) {
            const char *from = x.tiles + r / 32 * layout.block_stride + b.from / 32 * K_STEP_BYTES;
            sums.rows = min_long(32, rows - r), sums.total = buffers->total + r * PANEL, sums.scales = x.scales + r;
            sums.input_sums = buffers->input_sums + b.group * rows + r;
            if (sums.rows > 16)
                multiply_groups(&layout, from, buffers->chunk, steps, each, &sums, 1);
            else
                multiply_groups(&layout, from, buffers->chunk, steps, each, &sums, 0);
            add_sums(&sums);
        }
    }
    if (g->t <= MAX_STREAMED_ROWS) {
        copy_from_tiles(buffers->total, rows, buffers->acc);
        keep_block(g, buffers->results, buffers->acc, 0, rows, panel);
        return;
    }
    for (long r = 0; r < rows; r += 32)
        (can_bypass_caches(g) ? store_past_caches : store_tiles)(g, buffers->total + r * PANEL, row + r,
                                                                 min_long(32, rows - r), panel);
}
