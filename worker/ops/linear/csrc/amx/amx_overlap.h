/* Products in AMX tiles of many rows with a block of 128 inputs, for codes that stand for integers.
 *
 * Tiles multiply 32 rows by the 4 k-steps of the block. At the end of a group, the sums must be stored and scaled, which
 * takes about as long as multiplying. So the sums of 32 rows are scaled while the tiles compute the next 32 rows: four
 * rows after each product of two tiles. A tile is stored only when it is needed for the next group, because storing
 * waits for the tile's last product. */
#pragma once
#include "amx_rows.h"
#include "integer_rows.h"

#define OVERLAP_STEPS 4       /* k-steps of a block */
#define TILE_FLOATS (16 * 16) /* the sums of 16 rows and 16 columns in one group */
#define OVERLAP_TILES 16      /* tiles of sums in the buffer, which has 16 KB */

/* The scales and minimums of a block's groups, for each half of the panel. */
typedef struct {
    vf scale[2][OVERLAP_STEPS], minimum[2][OVERLAP_STEPS];
} GroupScales;

/* What the tiles multiply now, and where the 32 rows before these are scaled. */
typedef struct {
    const char *x, *next_x, *weight; /* x: the inputs of these 32 rows; next_x: of the next 32; weight: unpacked steps */
    float *sums;                     /* the middle of the buffer, so that offsets of both signs are short in machine code */
    const float *scales, *input_sums; /* of the rows before; the sums of groups are `stride` floats apart */
    float *total;                     /* of the rows before: [4 tiles] */
    long stride;
} Overlap;

/* Returns the offset from Overlap.sums of the sums of one tile and group. `odd`: 1 for every second 32 rows. `each`: the
 * k-steps of a group.
 *
 * The sums of 64 rows take up to 32 KB, too much for the L1 cache beside weights and inputs. With groups of one k-step,
 * they share 16 KB: while tile t of the rows before is scaled, its four groups leave exactly the place that the four
 * tiles of group t of these rows need one step later. */
INLINE long sums_at(int odd, int group, int tile, const int each) {
    long place = each > 1 ? odd * 8 + group * 4 + tile : odd ? tile * 4 + group : group * 4 + tile;
    return (place - OVERLAP_TILES / 2) * TILE_FLOATS;
}

/* Scales four rows of one tile, from row 4 * `part` on, and adds them to the total. `odd` is that of these rows. */
INLINE void scale_four_rows(const Overlap *o, const GroupScales *by, int odd, int tile, int part, const int each,
                            const int has_minimum) {
    const float *scales = o->scales + tile / 2 * 16 + part * 4, *input_sums = o->input_sums + tile / 2 * 16 + part * 4;
    float *total = o->total + tile * TILE_FLOATS + part * 64;
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++, total += 16) {
        vf sum = broadcast(0);
        for (int i = 0; i < OVERLAP_STEPS / each; i++) {
            const float *sums = o->sums + sums_at(odd, i, tile, each) + (part * 4 + r) * 16;
            sum = simd_fma(load_f32(sums), by->scale[tile % 2][i], sum);
        }
        sum = simd_fma(sum, broadcast(scales[r]), load_f32(total));
        for (int i = 0; has_minimum && i < OVERLAP_STEPS / each; i++)
            sum = simd_fma(broadcast(input_sums[i * o->stride + r]), by->minimum[tile % 2][i], sum);
        store_f32(total, sum);
    }
}

/* Stores the sums of the last group in an accumulator, and sets it to zero, if step `s` begins a group. */
#define BEGIN_GROUP(tile)                                                                              \
    do {                                                                                               \
        if (s % each) break;                                                                           \
        if (s) TILE_STORE(tile, o->sums + sums_at(odd, s / each - 1, tile, each), 64);                 \
        if (!s && !first) TILE_STORE(tile, o->sums + sums_at(!odd, OVERLAP_STEPS / each - 1, tile, each), 64); \
        TILE_ZERO(tile);                                                                               \
    } while (0)

/* Scales four rows of the tile of the rows before that has the number of the step. */
#define SCALE_ROWS(part)                                                               \
    do {                                                                               \
        if (!first) scale_four_rows(o, by, !odd, s, part, each, has_minimum);          \
    } while (0)

/* Multiplies 32 rows by the block, and scales the sums of the 32 rows before, unless these rows are the `first`. The
 * tiles of the first step are loaded already; those of the next rows' first step are loaded at the end. */
INLINE void multiply_32_rows(const Overlap *o, const GroupScales *by, const int each, const int has_minimum,
                             const int first, const int odd) {
#pragma GCC unroll 4
    for (int s = 0; s < OVERLAP_STEPS; s++) {
        int last = s + 1 == OVERLAP_STEPS;
        TILE_LOAD(5, o->x + s * K_STEP_BYTES + K_STEP_BYTES / 2, 64);
        BEGIN_GROUP(0);
        TILE_DOT(0, 4, 6);
        SCALE_ROWS(0);
        TILE_LOAD(7, o->weight + s * K_STEP_BYTES + K_STEP_BYTES / 2, 64);
        BEGIN_GROUP(2);
        TILE_DOT(2, 5, 6);
        SCALE_ROWS(1);
        TILE_LOAD(6, last ? o->weight : o->weight + (s + 1) * K_STEP_BYTES, 64);
        BEGIN_GROUP(1);
        TILE_DOT(1, 4, 7);
        SCALE_ROWS(2);
        TILE_LOAD(4, last ? o->next_x : o->x + (s + 1) * K_STEP_BYTES, 64);
        BEGIN_GROUP(3);
        TILE_DOT(3, 5, 7);
        SCALE_ROWS(3);
    }
}

/* Stores the last group of the last 32 rows, and scales their sums. */
INLINE void finish_rows(const Overlap *o, const GroupScales *by, const int each, const int has_minimum, const int odd) {
    const int group = OVERLAP_STEPS / each - 1;
    TILE_STORE(0, o->sums + sums_at(odd, group, 0, each), 64);
    TILE_STORE(1, o->sums + sums_at(odd, group, 1, each), 64);
    TILE_STORE(2, o->sums + sums_at(odd, group, 2, each), 64);
    TILE_STORE(3, o->sums + sums_at(odd, group, 3, each), 64);
#pragma GCC unroll 4
    for (int tile = 0; tile < 4; tile++)
        for (int part = 0; part < 4; part++) scale_four_rows(o, by, odd, tile, part, each, has_minimum);
}

/* Multiplies `rows` rows, a multiple of 32, by a block of inputs of a panel. head: the scales of its first group;
 * x_stride: bytes from 32 rows of inputs to the next. */
INLINE void multiply_overlapped(Overlap o, const Weight *w, const char *head, long x_stride, long rows, const int each,
                                const int has_minimum) {
    _Alignas(64) float sums[OVERLAP_TILES * TILE_FLOATS];
    GroupScales by;
    for (int i = 0; i < OVERLAP_STEPS / each; i++, head += group_bytes(w))
        for (int half = 0; half < 2; half++) {
            by.scale[half][i] = load_scales(w, head, half * 16);
            if (has_minimum) by.minimum[half][i] = load_minimums(w, head, half * 16);
        }
    o.sums = sums + OVERLAP_TILES / 2 * TILE_FLOATS;
    o.next_x = rows > 32 ? o.x + x_stride : o.x;
    TILE_LOAD(4, o.x, 64);
    TILE_LOAD(6, o.weight, 64);
    multiply_32_rows(&o, &by, each, has_minimum, 1, 0);
    int odd = 0;
    for (long r = 32; r < rows; r += 32) {
        odd = !odd, o.x += x_stride;
        o.next_x = r + 32 < rows ? o.x + x_stride : o.x;
        odd ? multiply_32_rows(&o, &by, each, has_minimum, 0, 1) : multiply_32_rows(&o, &by, each, has_minimum, 0, 0);
        o.scales += 32, o.input_sums += 32, o.total += 32 * PANEL;
    }
    odd ? finish_rows(&o, &by, each, has_minimum, 1) : finish_rows(&o, &by, each, has_minimum, 0);
}

typedef void Overlapped(Overlap o, const Weight *w, const char *head, long x_stride, long rows);

#define OVERLAPPED(each, has_minimum)                                                                            \
    static void overlapped_##each##_##has_minimum(Overlap o, const Weight *w, const char *head, long x_stride,   \
                                                  long rows) {                                                   \
        multiply_overlapped(o, w, head, x_stride, rows, each, has_minimum);                                      \
    }
OVERLAPPED(1, 0)
OVERLAPPED(1, 1)
OVERLAPPED(2, 0)
OVERLAPPED(2, 1)

/* Returns the function for a block, or NULL if the block is not four groups of one k-step or two groups of two. (The sums
 * of larger groups would not be exact, see linear/native.py.) */
INLINE Overlapped *overlapped_for(const Weight *w, IntegerBlock b) {
    static Overlapped *const functions[][2] = {{overlapped_1_0, overlapped_1_1}, {overlapped_2_0, overlapped_2_1}};
    long each = w->group / 32;
    if (b.count != OVERLAP_STEPS * 32 || each * b.parts != OVERLAP_STEPS || each > 2) return NULL;
    return functions[each - 1][w->has_minimum];
}
