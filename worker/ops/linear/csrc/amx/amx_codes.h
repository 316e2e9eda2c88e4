/* The AMX matmul with codes. Chunks are unpacked to bf16 pairs. At the end of a group, its sums are stored from the
 * tiles and scaled. */
#pragma once
#include "amx_rows.h"

/* The division of K into unpacked k-steps. A step has 32 inputs, or 16 if groups have 16. group_steps: steps of a
 * group. */
typedef struct {
    long inputs_per_step, group_steps, count; /* count: steps of the whole panel */
} CodeSteps;

INLINE CodeSteps code_steps(const Gemm *g) {
    long inputs = g->weight->group == CODE_BLOCK ? CODE_BLOCK : 32;
    return (CodeSteps){inputs, g->weight->group / inputs, ceil_div(g->k, inputs)};
}

/* Unpacks `steps` steps from `step` on. If steps have 16 inputs, an odd number of steps is rounded up. */
INLINE void unpack_steps(const Gemm *g, const CodeSteps *c, long panel, long step, long steps, char *to) {
    panel_pairs(g->weight, panel, step * c->inputs_per_step / 32, ceil_div(steps * c->inputs_per_step, 32), to,
                c->inputs_per_step == CODE_BLOCK);
}

/* Returns the address of the rows' inputs for a step. */
INLINE const char *rows_of_step(const RowLayout *x, const CodeSteps *c, long step) {
    return x->base + step * c->inputs_per_step / 32 * x->step_stride;
}

/* The steps of a group that are in one chunk. begins, ends: whether the group begins or ends in this chunk. */
typedef struct {
    long group, steps;
    int begins, ends;
} GroupPart;

INLINE GroupPart group_part(const Gemm *g, const CodeSteps *c, long step, long chunk_end) {
    long group = min_long(step / c->group_steps, group_count(g->weight) - 1);
    long end = group + 1 == group_count(g->weight) ? c->count : (group + 1) * c->group_steps;
    return (GroupPart){group, min_long(end, chunk_end) - step, step == group * c->group_steps, end <= chunk_end};
}

/* Scales the sums of a group in acc [rows][32], and adds them to the total. */
static void add_group_rows(const GroupEnd *end, const float *acc, float *total, long rows) {
    for (int j = 0; j < 2; j++) {
        vf scale = load_scales(end->weight, end->head, j * 16), minimum = broadcast(0);
        if (end->weight->has_minimum) minimum = load_minimums(end->weight, end->head, j * 16);
        for (long r = 0; r < rows; r++) {
            long at = r * PANEL + j * 16;
            store_f32(total + at, add_group(load_f32(total + at), load_f32(acc + at), scale, minimum, end, r));
        }
    }
}

/* Computes one panel of codes for up to MAX_STREAMED_ROWS rows. Accumulators stay in tiles over a group. A group's sums
 * are added to the total while the tiles compute the next group, because data that tiles stored cannot be read at
 * once. */
static void multiply_streamed_codes(const Gemm *g, const RowLayout *x, const ThreadBuffers *buffers, long panel) {
    CodeSteps c = code_steps(g);
    _Alignas(64) float sums[2][32 * PANEL], total[32 * PANEL];
    long complete = 0; /* groups that have ended */
    GroupEnd ends[2];
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
            if (complete) add_group_rows(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, g->t);
            ends[complete++ % 2] = (GroupEnd){g->weight, group_at(g->weight, panel, part.group),
                                              buffers->input_sums + part.group * g->t};
        }
    }
    add_group_rows(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, g->t);
    keep_block(g, buffers->results, total, 0, g->t, panel);
}

/* Scales the sums of a group in acc [4 tiles], and adds them to the total. */
static void add_group_tiles(const GroupEnd *end, const float *acc, float *total, long rows) {
    for (int tile = 0; tile < (rows > 16 ? 4 : 2); tile++) {
        vf scale = load_scales(end->weight, end->head, tile % 2 * 16), minimum = broadcast(0);
        if (end->weight->has_minimum) minimum = load_minimums(end->weight, end->head, tile % 2 * 16);
        for (long r = 0; r < min_long(16, rows - tile / 2 * 16); r++) {
            long at = tile * 256 + r * 16;
            store_f32(total + at, add_group(load_f32(total + at), load_f32(acc + at), scale, minimum, end,
                                            tile / 2 * 16 + r));
        }
    }
}

/* Multiplies up to 32 rows by the unpacked steps [s, chunk_end) of a panel, group by group. A group's sums are added to
 * the total while the tiles compute the next group, because data that tiles stored cannot be read at once. */
static void multiply_code_chunk(const Gemm *g, const CodeSteps *c, const RowLayout *x, const ThreadBuffers *buffers,
                                long panel, long s, long chunk_end, long r, long rows) {
    long here = min_long(32, rows - r * 32), complete = 0; /* complete: groups that ended in this chunk */
    _Alignas(64) float sums[2][32 * PANEL];
    float *unfinished = buffers->acc + r * 32 * PANEL, *total = buffers->total + r * 32 * PANEL;
    GroupEnd ends[2];
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
        if (complete) add_group_tiles(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, here);
        ends[complete % 2] = (GroupEnd){g->weight, group_at(g->weight, panel, part.group),
                                        buffers->input_sums + part.group * rows + r * 32};
        complete++;
    }
    if (complete) add_group_tiles(&ends[(complete + 1) % 2], sums[(complete + 1) % 2], total, here);
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
