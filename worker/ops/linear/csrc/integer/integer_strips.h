/* Multiplies strips of rows of integers by a panel of codes, which are unpacked once for all strips. */
#pragma once
#include "integer_few_rows.h"

/* A block of inputs of a panel with unpacked codes [pairs][32]. head: the scales and minimums of the first part's
 * group. */
typedef struct {
    const Weight *weight;
    const char *head;
    const int32_t *codes;
    long parts, pairs_of_part, pairs, minimums; /* minimums: how many groups with minimums end in this block */
    const char *next; /* the codes after this block */
    long lines;       /* how many cache lines these codes take */
} UnpackedBlock;

/* The data of a strip of rows in one block of inputs. pairs: [pairs][rows]; starts: [parts][stride]; input_sums:
 * [groups][stride]; scales: [rows]. */
typedef struct {
    const int32_t *pairs, *starts;
    const float *scales, *input_sums;
    long stride;
    const char *ahead, *ahead_end; /* the codes that the strip prefetches: `lines` cache lines before each part in each
                                      pass */
    long lines;
} StripRows;

/* Multiplies a strip of rows by a block: total [rows][32] += products. */
typedef void IntegerStrip(const UnpackedBlock *b, const StripRows *x, float *total);

/* Returns in how many passes a strip is multiplied by a block, each with some of its rows and some columns. */
#define integer_passes(rows) (PANEL_REGISTERS / registers_at_once(rows) * (integer_rows_at_once(rows) < (rows) ? 2 : 1))

/* Computes the sums of one part for `rows` rows of a strip of `stride` rows, and for `registers` neighbouring registers
 * of columns. The sums stay in registers. */
INLINE void multiply_part(const int32_t *codes, const int32_t *x, long pairs, const int32_t *starts,
                          vi sum[][PANEL_REGISTERS], const int rows, const int stride, const int registers) {
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sum[r][j] = broadcast_pair(starts + r);
    for (long p = 0; p < pairs; p++, x += stride, codes += PANEL) {
        vu code[PANEL_REGISTERS];
        for (int j = 0; j < registers; j++) code[j] = load_words((const char *)(codes + j * SIMD_WIDTH));
        for (int r = 0; r < rows; r++) {
            vu pair = (vu)broadcast_pair(x + r);
            for (int j = 0; j < registers; j++) sum[r][j] = add_pairs(sum[r][j], code[j], pair);
        }
    }
}

/* Multiplies `rows` rows of a strip of `stride` rows, from row `first` on, by `registers` registers of columns, from
 * `column` on. */
INLINE void multiply_integer_columns(const UnpackedBlock *b, const StripRows *x, float *total, int pass, int column,
                                     const int first, const int rows, const int stride, const int registers) {
    vf of_block[MAX_STRIP_ROWS][PANEL_REGISTERS];
    const int32_t *starts = x->starts + first;
    const char *head = b->head, *ahead = x->ahead + pass * b->parts * x->lines * 64;
    for (long p = 0, from = 0; p < b->parts; p++, from += b->pairs_of_part, starts += x->stride) {
        vi sum[MAX_STRIP_ROWS][PANEL_REGISTERS];
        for (long i = 0; i < x->lines && ahead < x->ahead_end; i++, ahead += 64) __builtin_prefetch(ahead, 0, 3);
        multiply_part(b->codes + from * PANEL + column, x->pairs + from * stride + first,
                      min_long(b->pairs_of_part, b->pairs - from), starts, sum, rows, stride, registers);
        for (int j = 0; j < registers; j++) {
            vf scale = load_scales(b->weight, head, column + j * SIMD_WIDTH);
            for (int r = 0; r < rows; r++)
                of_block[r][j] = simd_fma(as_floats(sum[r][j]), scale, p ? of_block[r][j] : broadcast(0));
        }
        head += group_bytes(b->weight);
    }
    vf minimums[MAX_PARTS][PANEL_REGISTERS];
    for (long i = 0; i < b->minimums; i++)
        for (int j = 0; j < registers; j++)
            minimums[i][j] = load_minimums(b->weight, b->head + i * group_bytes(b->weight), column + j * SIMD_WIDTH);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) {
            float *at = total + (first + r) * PANEL + column + j * SIMD_WIDTH;
            vf sum = simd_fma(of_block[r][j], broadcast(x->scales[first + r]), load_f32(at));
            for (long i = 0; i < b->minimums; i++)
                sum = simd_fma(broadcast(x->input_sums[i * x->stride + first + r]), minimums[i][j], sum);
            store_f32(at, sum);
        }
}

/* Multiplies a strip of `rows` rows by a block. */
INLINE void multiply_integer_strip(const UnpackedBlock *b, const StripRows *x, float *total, const int rows) {
    const int registers = registers_at_once(rows), first = integer_rows_at_once(rows);
    int pass = 0;
    for (int column = 0; column < PANEL; column += registers * SIMD_WIDTH) {
        multiply_integer_columns(b, x, total, pass++, column, 0, first, rows, registers);
        if (first < rows) multiply_integer_columns(b, x, total, pass++, column, first, rows - first, rows, registers);
    }
}

#define INTEGER_STRIP(rows)                                                                       \
    static void integer_strip_##rows(const UnpackedBlock *b, const StripRows *x, float *total) {  \
        multiply_integer_strip(b, x, total, rows);                                                \
    }
FOR_STRIP_ROWS(INTEGER_STRIP)

#define INTEGER_STRIP_ENTRY(rows) integer_strip_##rows,
static IntegerStrip *const integer_strips[] = {FOR_STRIP_ROWS(INTEGER_STRIP_ENTRY)};

/* Unpacks the codes of a block to pairs [count / 2][32], and returns the address of the codes of the next block. */
INLINE const char *unpack_integers(const Weight *w, long panel, IntegerBlock b, CodeTable table, int32_t *to,
                                   int kind) {
    CodeReader reader = read_codes(w, panel, b.from);
    for (long k = 0; k < b.count; k += CODE_BLOCK) {
        const char *block = read_block(&reader);
        for (int octet = 0; octet < 2; octet++, to += 4 * PANEL)
            for (int c = 0; c < PANEL; c += SIMD_WIDTH) {
                vu pairs[4];
                read_pairs(block, octet, c, table, kind, pairs);
                for (int p = 0; p < 4; p++) __builtin_memcpy(to + p * PANEL + c, &pairs[p], sizeof pairs[p]);
            }
    }
    return reader.block;
}

/* Returns the data of strip i. Every strip prefetches its share of the next block, part by part. So memory is read
 * while a block is multiplied, and not only while a block is unpacked. */
INLINE StripRows strip_rows(const UnpackedBlock *b, const Strips *s, long i, IntegerRows x, const float *input_sums,
                            IntegerBlock block, long rows) {
    long first = s->strip[i].row, here = s->strip[i].rows;
    long begin = b->lines * i / s->count, end = b->lines * (i + 1) / s->count;
    return (StripRows){x.pairs + first * integer_depth(b->weight) / 2 + block.from / 2 * here,
                       x.starts + block.part * rows + first, x.scales + first, input_sums + block.group * rows + first,
                       rows, b->next + begin * 64, b->next + end * 64, ceil_div(end - begin, integer_passes(here) * b->parts)};
}

/* Computes one panel for a block of rows: total [rows][32]. */
static void multiply_integer_panel(const Gemm *g, const Strips *s, const ThreadBuffers *buffers, long rows, long panel) {
    const Weight *w = g->weight;
    IntegerRows x = integer_rows(g, buffers->rows, rows);
    const float *input_sums = buffers->input_sums;
    if (has_few_integer_rows(g, x.table)) {
        multiply_few_integer_rows(g, buffers, panel);
        return;
    }
    memset(buffers->total, 0, rows * PANEL * sizeof(float));
    CodeTable table = load_code_table(x.table);
    int32_t *codes = (int32_t *)buffers->chunk;
    for (IntegerBlock b = block_at(w, 0, 0); b.from < w->k; b = block_after(w, b), x.scales += rows) {
        const char *next = w->kind == INTEGER8   ? unpack_integers(w, panel, b, table, codes, INTEGER8)
                           : w->kind == INTEGER6 ? unpack_integers(w, panel, b, table, codes, INTEGER6)
                                                 : unpack_integers(w, panel, b, table, codes, INTEGER4);
        long bytes = b.count / CODE_BLOCK * code_block_bytes(w) + b.parts * group_head_bytes(w);
        UnpackedBlock unpacked = {w, group_at(w, panel, b.group), codes, b.parts, b.inputs / 2, b.count / 2,
                                  w->has_minimum ? groups_ending(w, b) : 0, next, ceil_div(bytes, 64)};
        for (long i = 0; i < s->count; i++) {
            StripRows strip = strip_rows(&unpacked, s, i, x, input_sums, b, rows);
            integer_strips[s->strip[i].rows - 1](&unpacked, &strip, buffers->total + s->strip[i].row * PANEL);
        }
    }
}
