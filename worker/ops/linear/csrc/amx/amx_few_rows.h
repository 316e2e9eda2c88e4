/* Products of a few rows with codes, without tiles. With tiles, the sums of every group would have to be stored, which
 * takes as long for one row as for sixteen. Each element has the same bits as with tiles: in a k-step of 32 inputs,
 * TDPBF16PS sums the products of even and of odd inputs in two chains of fused multiply-adds from zero, and then adds
 * both to the sum. TDPBF16PS flushes denormals to zero, so gemm_amx.c sets this mode for all its products. */
#pragma once
#include "unpack_bf16.h"

#define FEW_ROWS 2
#define FEW_ROWS_GROUP 64 /* with groups of this many inputs or more, tiles are faster for two rows */

/* The sums of each row, for 2 x 16 columns. */
typedef struct {
    vf half[FEW_ROWS][2];
} RowSums;

/* Copies rows as fp32, zero-padded to whole k-steps: to [t][32 * steps]. */
static void widen_rows(const Gemm *g, const char *x, float *to) {
    long depth = ceil_div(g->k, 32) * 32;
    for (long r = 0; r < g->t; r++)
        for (long k = 0; k < depth; k += 16)
            store_f32(to + r * depth + k, k < g->k ? load(x + r * row_bytes(g), k, g->k, 1) : broadcast(0));
}

/* Adds the products of a block of 16 inputs. The chains of the two halves of the columns alternate, which hides the
 * latency of additions. Callers pass constants for `kind` and `rows`. */
INLINE void add_block(const char *codes, const float *x, long depth, __m512 table, RowSums *evens, RowSums *odds,
                      int kind, const int rows) {
#pragma GCC unroll 8
    for (int pair = 0; pair < CODE_BLOCK / 2; pair++)
        for (int half = 0; half < 2; half++) {
            vf even, odd;
            if (kind == TABLE4) {
                __m512i words = _mm512_loadu_si512(codes + (half * 2 + pair / 4) * 64);
                even = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(words, pair % 4 * 4), table);
                odd = (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(words, 16 + pair % 4 * 4), table);
            } else {
                const char *at = codes + half * 256 + pair * 32;
                even = (vf)(kind == INT8 ? int8_values(at) : e4m3_values(at));
                odd = (vf)(kind == INT8 ? int8_values(at + 16) : e4m3_values(at + 16));
            }
            for (int r = 0; r < rows; r++) {
                const float *inputs = x + r * depth + pair * 2;
                evens->half[r][half] = simd_fma(broadcast(inputs[0]), even, evens->half[r][half]);
                odds->half[r][half] = simd_fma(broadcast(inputs[1]), odd, odds->half[r][half]);
            }
        }
}

/* Adds the products of a whole group: inputs [begin, end). `end` is a multiple of CODE_BLOCK. */
INLINE void add_inputs(CodeReader *reader, const float *x, long begin, long end, long depth, __m512 table,
                       RowSums *sums, int kind, const int rows) {
    long step = reader->group_blocks == 1 ? CODE_BLOCK : 32;
    for (long k = begin; k < end; k += step) {
        RowSums evens = {{{{0}}}}, odds = {{{{0}}}};
        add_block(next_block(reader), x + k, depth, table, &evens, &odds, kind, rows);
        if (k + CODE_BLOCK < min_long(k + step, end))
            add_block(next_block(reader), x + k + CODE_BLOCK, depth, table, &evens, &odds, kind, rows);
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < 2; h++) sums->half[r][h] += evens.half[r][h] + odds.half[r][h];
    }
}

/* Computes one panel: total [rows][32]. x: [rows][depth]. */
INLINE void few_rows_panel(const Weight *w, long panel, const float *x, const float *input_sums, float *total, int kind,
                           const int rows) {
    /* rounds the values to bf16, because tiles multiply bf16 */
    __m512 table = _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(w->values))), 16));
    long depth = ceil_div(w->k, 32) * 32, padded = ceil_div(w->k, CODE_BLOCK) * CODE_BLOCK;
    CodeReader reader = read_codes(w, panel, 0);
    RowSums totals = {{{{0}}}};
    GroupEnd end = {w, group_at(w, panel, 0), input_sums};
    for (long k = 0; k < w->k; k += w->group, end.head += group_bytes(w), end.input_sums += rows) {
        RowSums sums = {{{{0}}}};
        add_inputs(&reader, x, k, min_long(k + w->group, padded), depth, table, &sums, kind, rows);
        for (int h = 0; h < 2; h++) {
            vf scale = load_scales(w, end.head, h * 16), minimum = broadcast(0);
            if (w->has_minimum) minimum = load_minimums(w, end.head, h * 16);
            for (int r = 0; r < rows; r++)
                totals.half[r][h] = add_group(totals.half[r][h], sums.half[r][h], scale, minimum, &end, r);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) store_f32(total + r * PANEL + h * 16, totals.half[r][h]);
}

typedef void FewRows(const Weight *w, long panel, const float *x, const float *input_sums, float *total);

#define FEW_ROWS_KERNEL(name, kind, rows)                                                                         \
    static void few_##name##_##rows(const Weight *w, long panel, const float *x, const float *sums, float *total) { \
        few_rows_panel(w, panel, x, sums, total, kind, rows);                                                     \
    }
FEW_ROWS_KERNEL(table4, TABLE4, 1)
FEW_ROWS_KERNEL(table4, TABLE4, 2)
FEW_ROWS_KERNEL(int8, INT8, 1)
FEW_ROWS_KERNEL(int8, INT8, 2)
FEW_ROWS_KERNEL(e4m3, E4M3, 1)
FEW_ROWS_KERNEL(e4m3, E4M3, 2)

/* The functions, indexed by number of rows - 1 and by kind. Plain numbers use tiles; integers use amx_integers.h. */
static FewRows *const few_rows_kernels[FEW_ROWS][4] = {
    {NULL, few_table4_1, few_int8_1, few_e4m3_1},
    {NULL, few_table4_2, few_int8_2, few_e4m3_2},
};
