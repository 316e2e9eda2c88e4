/* The AMX matmul with codes: chunks are unpacked to bf16 pairs, and the sums of a group leave the tiles when it ends. */
#pragma once
#include "gemm/amx/amx_integers.h"

/* The unpacked k-steps of one chunk, and where its groups are. A step holds 32 inputs, or 16 if groups have 16. */
typedef struct {
    long inputs_per_step, group_steps, count; /* count: steps of the whole panel */
} CodeSteps;

INLINE CodeSteps code_steps(const Gemm *g) {
    long inputs = g->weight->group == CODE_BLOCK ? CODE_BLOCK : 32;
    return (CodeSteps){inputs, g->weight->group / inputs, ceil_div(g->k, inputs)};
}

/* Unpacks `steps` steps from `step` on, and one more if an odd number of steps holds 16 inputs each. */
INLINE void unpack_steps(const Gemm *g, const CodeSteps *c, long panel, long step, long steps, char *to) {
    panel_pairs(g->weight, panel, step * c->inputs_per_step / 32, ceil_div(steps * c->inputs_per_step, 32), to,
                c->inputs_per_step == CODE_BLOCK);
}

/* Returns the rows that a step is multiplied with. */
INLINE const char *rows_of_step(const RowLayout *x, const CodeSteps *c, long step) {
    return x->base + step * c->inputs_per_step / 32 * x->step_stride;
}

/* A piece of a group: the steps of the group that one chunk holds. */
typedef struct {
    long group, steps;
    int begins, ends;
} GroupPart;

INLINE GroupPart group_part(const Gemm *g, const CodeSteps *c, long step, long chunk_end) {
    long group = min_long(step / c->group_steps, group_count(g->weight) - 1);
    long end = group + 1 == group_count(g->weight) ? c->count : (group + 1) * c->group_steps;
    return (GroupPart){group, min_long(end, chunk_end) - step, step == group * c->group_steps, end <= chunk_end};
}

/* The end of a group of 32 rows or fewer: where its sums are, and where they go. */
typedef struct {
    GroupEnd group;
    IntegerEnd integers; /* only if integers are multiplied */
} PartEnd;

/* Returns the end of a group of the block's rows from `row` on; the block has `rows`. */
INLINE PartEnd part_end(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long panel, long group,
                        long row, long rows) {
    PartEnd end = {.group = {g->weight, group_at(g->weight, panel, group), buffers->input_sums + group * rows + row}};
    if (multiplies_integers(g)) end.integers = integer_end(g, x->scales, group, row, rows);
    return end;
}

/* Adds the sums of a group in acc to the total. `in_tiles`: how sums are stored (see element). */
INLINE void add_sums(const Gemm *g, const PartEnd *end, const float *acc, float *of_block, float *total, long rows,
                     const int in_tiles) {
    const Weight *w = g->weight;
    if (multiplies_integers(g)) {
        add_integer_sums(&end->group, &end->integers, acc, of_block, total, rows, in_tiles);
        return;
    }
    for (int j = 0; j < 2; j++) {
        vf scale = load_scales(w, end->group.head, j * 16), minimum = broadcast(0);
        if (w->has_minimum) minimum = load_minimums(w, end->group.head, j * 16);
        for (long r = 0; r < rows; r++) {
            long at = element(r, j, in_tiles);
            store_f32(total + at, add_group(load_f32(total + at), load_f32(acc + at), scale, minimum, &end->group, r));
        }
    }
}

/* Computes one panel of codes for a few rows. The accumulators stay in tiles over a group. The sums of a group are added
 * while the tiles compute the next one: what tiles store cannot be read at once. */
static void multiply_streamed_codes(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long panel) {
    CodeSteps c = code_steps(g);
    _Alignas(64) float sums[2][32 * PANEL], of_block[32 * PANEL], total[32 * PANEL];
    long complete = 0; /* groups that have ended */
    PartEnd ends[2];
    memset(total, 0, g->t * PANEL * sizeof(float));
    for (long s = 0; s < c.count; s += CHUNK_STEPS) {
        long chunk_end = min_long(s + CHUNK_STEPS, c.count);
        unpack_steps(g, &c, panel, s, chunk_end - s, buffers->chunk);
        for (long at = s; at < chunk_end;) {
            GroupPart part = group_part(g, &c, at, chunk_end);
            const char *weight = buffers->chunk + (at - s) * K_STEP_BYTES;
            if (part.begins) EACH_ACCUMULATOR(ZERO_TILE, g->t > 16);
            for (long i = 0; i < part.steps; i++, weight += K_STEP_BYTES) {
                if (g->t > 16)
                    stream_32_rows(x, rows_of_step(x, &c, at + i), weight, 1, 0);
                else
                    stream_16_rows(x, rows_of_step(x, &c, at + i), weight, 1, 0);
            }
            at += part.steps;
            if (!part.ends) break;
            float *acc = sums[complete % 2];
            EACH_ACCUMULATOR(TILE_STORE, g->t > 16);
            if (complete) add_sums(g, &ends[(complete + 1) % 2], sums[(complete + 1) % 2], of_block, total, g->t, 0);
            ends[complete++ % 2] = part_end(g, x, buffers, panel, part.group, 0, g->t);
        }
    }
    add_sums(g, &ends[(complete + 1) % 2], sums[(complete + 1) % 2], of_block, total, g->t, 0);
    keep_block(g, buffers->results, total, 0, g->t, panel);
}

/* Multiplies 32 rows, or fewer, by the unpacked steps [s, chunk_end) of a panel, group by group. The sums of a group are
 * added while the tiles compute the next one: what tiles store cannot be read at once. */
static void multiply_code_chunk(const Gemm *g, const CodeSteps *c, const RowLayout *x, const ThreadBuffers *buffers,
                                long panel, long s, long chunk_end, long r, long rows) {
    long here = min_long(32, rows - r * 32), complete = 0; /* complete: groups that ended in this chunk */
    _Alignas(64) float sums[2][32 * PANEL];
    float *unfinished = buffers->acc + r * 32 * PANEL, *total = buffers->total + r * 32 * PANEL;
    PartEnd ends[2];
    for (long at = s; at < chunk_end;) {
        GroupPart part = group_part(g, c, at, chunk_end);
        const char *from = rows_of_step(x, c, at) + r * x->block_stride;
        const char *weight = buffers->chunk + (at - s) * K_STEP_BYTES;
        float *to = part.ends ? sums[complete % 2] : unfinished;
        if (here > 16)
            multiply_chunk(x, from, weight, part.steps, unfinished, to, part.begins, weight, 0, 1);
        else
            multiply_chunk(x, from, weight, part.steps, unfinished, to, part.begins, weight, 0, 0);
        at += part.steps;
        if (!part.ends) break;
        if (complete) add_sums(g, &ends[(complete + 1) % 2], sums[(complete + 1) % 2], unfinished, total, here, 1);
        ends[complete++ % 2] = part_end(g, x, buffers, panel, part.group, r * 32, rows);
    }
    if (complete) add_sums(g, &ends[(complete + 1) % 2], sums[(complete + 1) % 2], unfinished, total, here, 1);
}

/* Computes one panel of codes for a block of rows. */
static void multiply_blocked_codes(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long row, long rows,
                                   long panel) {
    CodeSteps c = code_steps(g);
    long high = ceil_div(rows, 32);
    int bypass = can_bypass_caches(g);
    memset(buffers->total, 0, high * 32 * PANEL * sizeof(float));
    for (long s = 0; s < c.count; s += CHUNK_STEPS) {
        long chunk_end = min_long(s + CHUNK_STEPS, c.count);
        unpack_steps(g, &c, panel, s, chunk_end - s, buffers->chunk);
        for (long r = 0; r < high; r++) multiply_code_chunk(g, &c, x, buffers, panel, s, chunk_end, r, rows);
    }
    for (long r = 0; r < high; r++)
        (bypass ? store_past_caches : store_tiles)(g, buffers->total + r * 32 * PANEL, row + r * 32,
                                                   min_long(32, rows - r * 32), panel);
}
