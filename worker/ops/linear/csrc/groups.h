/* Groups of inputs that share a scale. The product of codes and inputs is computed in fp32 as
 *
 *     sum over groups of  scale * (sum over the group of value(code) * x)  +  minimum * (sum over the group of x)
 *
 * If x is converted to integers, integer_few_rows.h defines the order of operations. The values of codes are exact in
 * bf16, except NF4's values, which kernels that multiply bf16 round. So no rounding depends on the scale. Every sum has
 * the same order for any number of rows. */
#pragma once
#include "gemm.h"

/* How many bytes ahead codes are prefetched into the L1 cache and, if PREFETCH_L2 is not 0, into the L2 cache before.
 * Intel's processors have few loads into the L1 cache in flight, so codes go to the L2 cache first. On Zen 5 (AVX-512 for
 * bf16 without AMX) a second prefetch costs more than it saves: one row of 4-bit codes reads 0.70 of memory's speed with
 * both, 0.90 with one. */
#if defined(__AVX512BF16__) && !defined(__PRFCHW__)
#define PREFETCH_L2 0
#define PREFETCH_L1 6144
#else
#define PREFETCH_L2 4096
#define PREFETCH_L1 2048
#endif

/* What is needed at the end of a group to scale its sums. */
typedef struct {
    const Weight *weight;
    const char *head;        /* the group's scales and minimums */
    const float *input_sums; /* the sum of each row's inputs in this group */
} GroupEnd;

#if SIMD_WIDTH == 16
INLINE vf load_f16(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#else
INLINE vf load_f16(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#endif

/* Loads the scales of SIMD_WIDTH columns, from `column` on. head: the group's scales and minimums. */
INLINE vf load_scales(const Weight *w, const char *head, long column) {
    vf number = w->scale_bytes == 4 ? load_f32((const float *)head + column) : load_f16((const uint16_t *)head + column);
    return number * w->factor;
}

INLINE vf load_minimums(const Weight *w, const char *head, long column) {
    return load_scales(w, head + PANEL * w->scale_bytes, column);
}

/* Scales one row's sums of a group and adds them to `total`. All callers must get the same bits, so the fused
 * multiply-adds are explicit: gcc may or may not fuse a product and a sum. */
INLINE vf add_group(vf total, vf sum, vf scale, vf minimum, const GroupEnd *end, int row) {
    total = simd_fma(sum, scale, total);
    return end->weight->has_minimum ? simd_fma(broadcast(end->input_sums[row]), minimum, total) : total;
}

/* Returns the value of one unit of a weight's integer codes: 1, or 0.5 if 4-bit codes stand for multiples of 0.5. */
INLINE float integer_unit(const Weight *w) {
    int halves = 0;
    for (int i = 0; i < 16; i++) halves |= w->values[i] != (float)(int)w->values[i];
    return w->kind == INTEGER4 && halves ? 0.5f : 1.0f;
}

/* Sums the inputs of each group of each row of x [rows, K]. sums: [groups][rows]. */
static void sum_inputs(const Gemm *g, const char *x, long rows, float *sums) {
    for (long r = 0; r < rows; r++, x += row_bytes(g)) {
        for (long i = 0; i < group_count(g->weight); i++) {
            long begin = i * g->weight->group, end = min_long(begin + g->weight->group, g->k);
            vf sum = broadcast(0);
            for (long k = begin; k < end; k += SIMD_WIDTH)
                sum += g->x_bf16 ? load(x, k, end, 1) : load(x, k, end, 0);
            sums[i * rows + r] = simd_sum(sum);
        }
    }
}

/* Returns how many floats `sum_inputs` needs: none for the INT8_INPUTS kinds, which sum rounded inputs (int8_rows.h). */
INLINE long input_sums_size(const Gemm *g, long rows) {
    return g->weight->kind != PLAIN && g->weight->kind < INT8_INPUTS4 && g->weight->has_minimum ? ceil_div(group_count(g->weight) * rows, 16) * 16 : 0;
}

INLINE void prefetch_codes(const char *codes, long bytes) {
    for (long i = 0; i < bytes; i += 64) {
        if (PREFETCH_L2) __builtin_prefetch(codes + PREFETCH_L2 + i, 0, 2);
        __builtin_prefetch(codes + PREFETCH_L1 + i, 0, 3);
    }
}

/* An iterator over the blocks of codes of a panel. */
typedef struct {
    const char *block;
    long left, group_blocks, block_bytes, head_bytes; /* left: how many blocks of this group are left, `block`
                                                         included */
} CodeReader;

/* Returns a reader that begins at the block of input k. */
INLINE CodeReader read_codes(const Weight *w, long panel, long k) {
    long group = k / w->group, blocks = w->group / CODE_BLOCK, done = (k - group * w->group) / CODE_BLOCK;
    CodeReader r = {NULL, blocks - done, blocks, code_block_bytes(w), group_head_bytes(w)};
    r.block = group_at(w, panel, group) + r.head_bytes + done * r.block_bytes;
    return r;
}

/* Returns the next block, and advances the reader. */
INLINE const char *read_block(CodeReader *r) {
    const char *block = r->block;
    r->block += r->block_bytes;
    if (--r->left) return block;
    r->block += r->head_bytes, r->left = r->group_blocks;
    return block;
}

/* Returns the next block, advances the reader, and prefetches later blocks. */
INLINE const char *next_block(CodeReader *r) {
    prefetch_codes(r->block, r->block_bytes);
    if (r->left == 1) prefetch_codes(r->block + r->block_bytes, r->head_bytes);
    return read_block(r);
}
