/* Products with codes that stand for integers of four bits, in tiles. Inputs become integers as in integer_rows.h, which
 * bf16 holds exactly. The sums of a group are less than 2^24 then (packed_weight.py sees to it), so tiles add exactly, and
 * every element has the bits of integer_few_rows.h. */
#pragma once
#include "gemm/amx/amx_rows.h"
#include "gemm/integer/integer_few_rows.h"

/* What the end of a group does: the sums of a block of groups are multiplied by what 1 stands for in its inputs. */
typedef struct {
    int begins, groups;  /* whether the group begins a block; how many groups the block has if it ends one, else 0 */
    const float *scales; /* of the rows, in this block */
    long rows;           /* the distance between sums of inputs of neighbouring groups */
} IntegerEnd;

INLINE IntegerEnd integer_end(const Gemm *g, const float *scales, long group, long row, long rows) {
    long most = MAX_INTEGER_BLOCK / g->weight->group, number = group % most + 1;
    int ends = number == most || group + 1 == group_count(g->weight);
    return (IntegerEnd){number == 1, ends ? number : 0, scales + group / most * rows + row, rows};
}

/* Adds the sums of a group to those of its block, and these to the total when the block ends. */
INLINE void add_integer_sums(const GroupEnd *end, const IntegerEnd *block, const float *acc, float *of_block,
                             float *total, long rows, const int in_tiles) {
    const Weight *w = end->weight;
    long minimums = w->has_minimum ? block->groups : 0;
    for (int j = 0; j < 2; j++) {
        vf scale = load_scales(w, end->head, j * 16), minimum[MAX_PARTS];
        for (long i = 0; i < minimums; i++)
            minimum[i] = load_minimums(w, end->head - (minimums - 1 - i) * group_bytes(w), j * 16);
        for (long r = 0; r < rows; r++) {
            long at = element(r, j, in_tiles);
            vf sum = simd_fma(load_f32(acc + at), scale, block->begins ? broadcast(0) : load_f32(of_block + at));
            if (!block->groups) {
                store_f32(of_block + at, sum);
                continue;
            }
            sum = simd_fma(sum, broadcast(block->scales[r]), load_f32(total + at));
            for (long i = 0; i < minimums; i++)
                sum = simd_fma(broadcast(end->input_sums[r - (minimums - 1 - i) * block->rows]), minimum[i], sum);
            store_f32(total + at, sum);
        }
    }
}

/* Returns the bytes of a block of rows as tiles, with their scales. */
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

/* Converts a block of rows to tiles: to [rows / 32][k-steps][32 rows][32], with zeros beyond the rows and beyond K. */
static RowLayout integer_tiles(const Gemm *g, const bf16 *x, long rows, char *to) {
    const Weight *w = g->weight;
    long steps = ceil_div(g->k, 32);
    float unit = integer_unit(w), factor, *scales = (float *)(to + ceil_div(rows, 32) * steps * K_STEP_BYTES);
    for (long r = 0; r < ceil_div(rows, 32) * 32; r++, x += g->k) {
        char *at = to + r / 32 * steps * K_STEP_BYTES + r % 32 * 64, *end = at + steps * K_STEP_BYTES;
        float *scale = scales + r;
        for (IntegerBlock b = block_at(w, 0, 0); r < rows && b.from < w->k; b = block_after(w, b), scale += rows) {
            bf16 inputs[MAX_INTEGER_BLOCK] = {0};
            memcpy(inputs, x + b.from, min_long(b.count, w->k - b.from) * sizeof(bf16));
            *scale = block_scale(inputs, b.count, &factor) * unit;
            for (long k = 0; k < b.count; k += 32, at += K_STEP_BYTES)
                _mm512_store_si512(at, integers_of_step(inputs + k, factor));
        }
        for (; at < end; at += K_STEP_BYTES) _mm512_store_si512(at, _mm512_setzero_si512());
    }
    return (RowLayout){to, steps * K_STEP_BYTES, 64, K_STEP_BYTES, scales};
}
