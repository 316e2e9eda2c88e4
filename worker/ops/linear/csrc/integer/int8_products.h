/* Products of codes with inputs of 8 bits (int8_rows.h), by integer instructions that multiply bytes.
 *
 * Codes are read into registers and are not unpacked to memory, except 6-bit codes if there are many rows. Every element
 * is computed as
 *
 *     sum over groups of  scale * (sum over the group's pieces of scale of x * (sum of the piece's integers))
 *                         + minimum * (sum over the group of x)
 *
 * in this order and with fused multiply-adds, for any number of rows and with every instruction set. */
#pragma once
#include "int8_rows.h"
#include "integer_bytes.h"

#define UNPACKED (WHOLE_BYTES + 1) /* codes in a buffer, as unpack_six_bits writes them */
#define UNPACKS_CODES (RAISES_CODES && SIMD_WIDTH == 16) /* whether 6-bit codes are unpacked once for all strips */
#define UNPACKED_CHUNK 512 /* how many inputs of a panel are unpacked at once: their codes (16 KB) stay in the L1 cache */
#define INT8_CHUNK 128 /* about how many inputs of a panel all columns multiply before the next inputs are read */

/* Returns how many registers of columns are multiplied at once, so that all sums stay in registers. Twice as many rows
 * and half as many columns would have as many sums, but load more for each product. */
#if SIMD_WIDTH == 16
#define int8_registers(rows) PANEL_REGISTERS
#else
#define int8_registers(rows) ((rows) * PANEL_REGISTERS <= 4 ? PANEL_REGISTERS : (rows) > 2 ? 1 : 2)
#endif

#ifndef HAS_DOT_BYTES
/* Magnitudes of signed codes, which are multiplied by inputs with the codes' signs. The sum of two products is at most
 * 2 * 128 * 127, which fits in 16 bits. */
#if SIMD_WIDTH == 16
INLINE vu magnitudes(vu codes) { return (vu)_mm512_abs_epi8((__m512i)codes); }
INLINE vu with_signs(vu x, vu codes) {
    return (vu)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)codes), _mm512_setzero_si512(), (__m512i)x);
}
#else
INLINE vu magnitudes(vu codes) { return (vu)_mm256_abs_epi8((__m256i)codes); }
INLINE vu with_signs(vu x, vu codes) { return (vu)_mm256_sign_epi8((__m256i)x, (__m256i)codes); }
#endif
#endif

/* Adds the products of four inputs with codes of any byte. */
INLINE vi add_whole_bytes(vi sum, vu codes, vi x) {
#ifdef HAS_DOT_BYTES
    return dot_signed(sum, codes, x);
#else
    return sum + WIDEN_16(ADD_BYTE_PAIRS(magnitudes(codes), with_signs((vu)x, codes)));
#endif
}

/* Sums the products of an octet of codes of at least 0, its even and its odd inputs. Without dot products of bytes, sums
 * of nibbles stay in 16 bits: a piece has at most eight sums of two products, each at most 2 * 15 * 127. Of 6-bit codes,
 * only two sums, each at most 2 * 63 * 127, fit. */
INLINE vi add_octet(vi sum, vu even, vu odd, vi of_even, vi of_odd, const int six_bits) {
#ifdef HAS_DOT_BYTES
    (void)six_bits;
    return dot_signed(dot_signed(sum, even, of_even), odd, of_odd);
#else
    if (six_bits) return sum + WIDEN_16(ADD_16(ADD_BYTE_PAIRS(even, of_even), ADD_BYTE_PAIRS(odd, of_odd)));
    return (vi)ADD_16(ADD_16((REGISTER_16)sum, ADD_BYTE_PAIRS(even, of_even)), ADD_BYTE_PAIRS(odd, of_odd));
#endif
}

/* Sums the products of codes of at least 0, of 4 bits or, with `six_bits`, of 6 bits: `count` blocks of 16 inputs.
 * stride: how many words of x lie between one word of a row and the next one. Callers pass a constant `six_bits`. */
INLINE void sum_raised(const char *block, long count, int column, const int32_t *x, const int32_t *starts,
                       vi sum[][PANEL_REGISTERS], const int six_bits, const int rows, const int stride,
                       const int registers) {
#ifdef HAS_DOT_BYTES
    const int in_16_bits = 0;
#else
    const int in_16_bits = !six_bits;
#endif
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sum[r][j] = in_16_bits ? (vi){0} : broadcast_pair(starts + r);
    const long block_bytes = CODE_BLOCK * PANEL * (six_bits ? 6 : 4) / 8;
    for (long octet = 0; octet < 2 * count; octet++, x += 2 * stride) {
        vu codes[PANEL_REGISTERS][2];
        for (int j = 0; j < registers; j++)
            read_octet(block + octet / 2 * block_bytes, octet % 2, column + j * SIMD_WIDTH, six_bits, codes[j]);
        for (int r = 0; r < rows; r++) {
            vi of_even = broadcast_pair(x + r), of_odd = broadcast_pair(x + stride + r);
            for (int j = 0; j < registers; j++)
                sum[r][j] = add_octet(sum[r][j], codes[j][0], codes[j][1], of_even, of_odd, six_bits);
        }
    }
#ifndef HAS_DOT_BYTES
    for (int r = 0; in_16_bits && r < rows; r++)
        for (int j = 0; j < registers; j++)
            sum[r][j] = WIDEN_16((REGISTER_16)sum[r][j]) + broadcast_pair(starts + r);
#endif
}

/* Sums the products of codes of any byte. Callers pass a constant `kind`. */
INLINE void sum_whole_bytes(const char *block, long count, int column, const int32_t *x, const int32_t *starts,
                            CodeTable table, vi sum[][PANEL_REGISTERS], int kind, const int rows, const int stride,
                            const int registers) {
    const int step = kind == TABLE_BYTES ? 2 : 1; /* how many words of inputs meet one load of codes */
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sum[r][j] = broadcast_pair(starts + r);
    for (long i = 0; i < 4 / step * count; i++, block += 4 * PANEL)
        for (int j = 0; j < registers; j++) {
            vu words = load_words(block + (column + j * SIMD_WIDTH) * 4);
            for (int half = 0; half < step; half++) {
                vu codes = RAISES_CODES ? words ^ 0x80808080u : words;
                if (kind == TABLE_BYTES) codes = look_up(table, (half ? words >> 4 : words) & 0x0f0f0f0fu);
                for (int r = 0; r < rows; r++)
                    sum[r][j] = add_whole_bytes(sum[r][j], codes, broadcast_pair(x + (i * step + half) * stride + r));
            }
        }
}

/* Sums the products of codes that are unpacked: words of four codes each (see unpack_six_bits). */
INLINE void sum_unpacked(const char *codes, long count, int column, const int32_t *x, const int32_t *starts,
                         vi sum[][PANEL_REGISTERS], const int rows, const int stride, const int registers) {
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) sum[r][j] = broadcast_pair(starts + r);
    for (long i = 0; i < 4 * count; i++, codes += 4 * PANEL, x += stride) {
        vu words[PANEL_REGISTERS];
        for (int j = 0; j < registers; j++) words[j] = load_words(codes + (column + j * SIMD_WIDTH) * 4);
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < registers; j++) sum[r][j] = add_whole_bytes(sum[r][j], words[j], broadcast_pair(x + r));
    }
}

INLINE vf load_stored(const Weight *w, const char *head, long column) {
    return w->scale_bytes == 4 ? load_f32((const float *)head + column) : load_f16((const uint16_t *)head + column);
}

/* Which of the cache lines of a piece are prefetched with each piece. A panel is read once for each strip of rows, so
 * every strip prefetches a share of the lines. */
typedef struct {
    long begin, bytes;
} Share;

/* Returns share `index` of `count` shares. */
INLINE Share share_of_piece(const Weight *w, long index, long count) {
    long lines = piece_inputs(w) / CODE_BLOCK * code_block_bytes(w) / 64, begin = lines * index / count;
    return (Share){begin * 64, (lines * (index + 1) / count - begin) * 64};
}

/* Adds the products of groups [group, end) for `rows` rows of a strip of `stride` rows and for `registers` registers of
 * columns, from `column` on: to out [rows][32], from zero if `group` is 0. head: the first of these groups; unpacked:
 * their codes if `kind` is UNPACKED; inputs: piece_inputs. Callers pass a constant `one_piece`: whether a group has one
 * piece, whose sums then need no registers beside the totals; and then a constant `inputs`, so that no address needs a
 * division. */
INLINE void multiply_int8_groups(const Weight *w, const char *head, long group, long end, Int8Rows x, CodeTable table,
                                 int column, float *out, Share ahead, const char *unpacked, int kind,
                                 const long inputs, const int one_piece, const int rows, const int stride,
                                 const int registers) {
    const long in_group = one_piece ? 1 : w->group / inputs;
    const int bits = kind == NIBBLES || kind == TABLE_BYTES ? 4 : kind == WHOLE_BYTES ? 8 : 6;
    const long head_bytes = group_head_bytes(w), bytes = inputs * PANEL * bits / 8;
    vf total[MAX_STRIP_ROWS][PANEL_REGISTERS];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++)
            total[r][j] = group ? load_f32(out + r * PANEL + column + j * SIMD_WIDTH) : broadcast(0);
    for (; group < end; group++, head += head_bytes + in_group * bytes) {
        const char *block = head + head_bytes;
        long piece = group * in_group, last = one_piece ? piece + 1 : min_long(piece + in_group, int8_pieces(w));
        vf of_group[MAX_STRIP_ROWS][PANEL_REGISTERS];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < registers; j++) of_group[r][j] = broadcast(0);
        do {
            vi sum[MAX_STRIP_ROWS][PANEL_REGISTERS];
            const int32_t *words = x.words + piece * inputs / 4 * stride, *starts = x.starts + piece * stride;
            const float *scales = x.scales + piece * inputs / INT8_BLOCK * stride;
            prefetch_codes(block + ahead.begin, ahead.bytes);
            if (kind == UNPACKED) {
                sum_unpacked(unpacked, inputs / CODE_BLOCK, column, words, starts, sum, rows, stride, registers);
                unpacked += inputs * PANEL;
            } else if (kind == NIBBLES || kind == SIX_BITS)
                sum_raised(block, inputs / CODE_BLOCK, column, words, starts, sum, kind == SIX_BITS, rows, stride,
                           registers);
            else
                sum_whole_bytes(block, inputs / CODE_BLOCK, column, words, starts, table, sum, kind, rows, stride,
                                registers);
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < registers; j++) {
                    vf of_piece = as_floats(sum[r][j]);
                    of_group[r][j] = one_piece ? of_piece * scales[r] : simd_fma(of_piece, broadcast(scales[r]), of_group[r][j]);
                }
            block += bytes;
        } while (++piece < last && !one_piece);
        if (!ahead.begin && ahead.bytes) prefetch_codes(block, group_head_bytes(w));
        for (int j = 0; j < registers; j++) {
            vf scale = load_stored(w, head, column + j * SIMD_WIDTH);
            for (int r = 0; r < rows; r++) total[r][j] = simd_fma(of_group[r][j], scale, total[r][j]);
            if (!w->has_minimum) continue;
            vf minimum = load_stored(w, head + PANEL * w->scale_bytes, column + j * SIMD_WIDTH);
            for (int r = 0; r < rows; r++)
                total[r][j] = simd_fma(broadcast(x.sums[group * stride + r]), minimum, total[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < registers; j++) store_f32(out + r * PANEL + column + j * SIMD_WIDTH, total[r][j]);
}

/* Adds the products of groups [group, last) of a panel for a strip of rows to out [rows][32], from zero if `group` is 0.
 * The strip is number `strip` of `strips`. */
INLINE void multiply_int8_strip(const Weight *w, long panel, long group, long last, Int8Rows x, CodeTable table,
                                const char *unpacked, float *out, long strip, long strips, int kind, const long inputs,
                                const int one_piece, const int rows) {
    const int registers = int8_registers(rows), first = integer_rows_at_once(rows);
    const int by_columns = PANEL_REGISTERS / registers, passes = by_columns * (first < rows ? 2 : 1);
    const Int8Rows rest = {x.words + first, x.starts + first, x.scales + first, x.sums + first};
    const long at_once = passes == 1 ? last - group : max_long(INT8_CHUNK / w->group, 1), group_size = group_bytes(w);
    const char *head = group_at(w, panel, group);
    Share shares[2 * PANEL_REGISTERS];
    for (int i = 0; i < passes; i++) shares[i] = share_of_piece(w, strip * passes + i, strips * passes);
    for (; group < last; group += at_once, head += at_once * group_size, unpacked += at_once * w->group * PANEL) {
        long end = min_long(group + at_once, last);
        for (int j = 0; j < by_columns; j++)
            multiply_int8_groups(w, head, group, end, x, table, j * registers * SIMD_WIDTH, out, shares[j], unpacked,
                                 kind, inputs, one_piece, first, rows, registers);
        for (int j = 0; first < rows && j < by_columns; j++)
            multiply_int8_groups(w, head, group, end, rest, table, j * registers * SIMD_WIDTH, out + first * PANEL,
                                 shares[by_columns + j], unpacked, kind, inputs, one_piece, rows - first, rows,
                                 registers);
    }
}

typedef void Int8Strip(const Weight *w, long panel, long group, long end, Int8Rows x, CodeTable table,
                       const char *unpacked, float *out, long strip, long strips);

/* Functions for each size of a piece compute fewer addresses. But they take long to compile, many rows multiply longer
 * than they compute addresses, and without dot products of bytes gcc orders those for 32 inputs so that registers do not
 * suffice (4 rows are a seventh slower). So there are none of these. */
#if defined(HAS_DOT_BYTES) && SIMD_WIDTH == 16
#define KNOWN_32 1
#else
#define KNOWN_32 0
#endif
INLINE long unknown(long number) { /* keeps gcc from knowing a constant */
    __asm__("" : "+r"(number));
    return number;
}
#define INT8_CALL(kind, inputs, one_piece, rows) \
    multiply_int8_strip(w, panel, group, end, x, table, unpacked, out, strip, strips, kind, inputs, one_piece, rows)
#define INT8_KERNEL(name, kind, rows)                                                                              \
    static void name##_##rows(const Weight *w, long panel, long group, long end, Int8Rows x, CodeTable table,      \
                              const char *unpacked, float *out, long strip, long strips) {                         \
        const int few = (rows) <= (KNOWN_32 ? 8 : 6);                                                              \
        if (few && KNOWN_32 && w->group == 32)                                                                     \
            INT8_CALL(kind, 32, 1, rows);                                                                          \
        else if (few && w->group == 16)                                                                            \
            INT8_CALL(kind, 16, 1, rows);                                                                          \
        else if (w->group == piece_inputs(w))                                                                      \
            INT8_CALL(kind, KNOWN_32 ? piece_inputs(w) : unknown(piece_inputs(w)), 1, rows);                       \
        else                                                                                                       \
            INT8_CALL(kind, piece_inputs(w), 0, rows);                                                             \
    }
#if UNPACKS_CODES
#define INT8_UNPACKED_KERNEL(rows) INT8_KERNEL(int8_unpacked, UNPACKED, rows)
#define INT8_UNPACKED_ENTRY(rows) , int8_unpacked_##rows
#else
#define INT8_UNPACKED_KERNEL(rows)
#define INT8_UNPACKED_ENTRY(rows)
#endif
#define INT8_KERNELS(rows)                          \
    INT8_KERNEL(int8_nibbles, NIBBLES, rows)        \
    INT8_KERNEL(int8_table, TABLE_BYTES, rows)      \
    INT8_KERNEL(int8_six, SIX_BITS, rows)           \
    INT8_KERNEL(int8_bytes, WHOLE_BYTES, rows)      \
    INT8_UNPACKED_KERNEL(rows)
FOR_STRIP_ROWS(INT8_KERNELS)

/* The functions, indexed by number of rows - 1 and by kind of CodeBytes. */
#define INT8_ENTRY(rows) \
    {int8_nibbles_##rows, int8_table_##rows, int8_six_##rows, int8_bytes_##rows INT8_UNPACKED_ENTRY(rows)},
static Int8Strip *const int8_kernels[][UNPACKED + 1] = {FOR_STRIP_ROWS(INT8_ENTRY)};

/* Unpacks the 6-bit codes of groups [group, end) to bytes, in words of four in the order of the rows' words:
 * [inputs / 4][32]. */
INLINE void unpack_six_bits(const Weight *w, long panel, long group, long end, char *to) {
    long inputs = min_long(end * w->group, ceil_div(w->k, CODE_BLOCK) * CODE_BLOCK) - group * w->group;
    CodeReader reader = read_codes(w, panel, group * w->group);
    for (; inputs > 0; inputs -= CODE_BLOCK, to += CODE_BLOCK * PANEL) {
        const char *block = read_block(&reader);
        for (int c = 0; c < PANEL; c += SIMD_WIDTH) {
            vu words[4];
            read_octet(block, 0, c, 1, words);
            read_octet(block, 1, c, 1, words + 2);
            for (int i = 0; i < 4; i++) __builtin_memcpy(to + (i * PANEL + c) * 4, &words[i], sizeof words[i]);
        }
    }
}

/* Adds the products of groups [group, end) of a panel for strip i to its totals. */
INLINE void add_strip(const Gemm *g, const Strips *s, const ThreadBuffers *buffers, long panel, long group, long end,
                      CodeTable table, long i, int kind) {
    long row = s->strip[i].row, rows = s->strip[i].rows;
    int8_kernels[rows - 1][kind](g->weight, panel, group, end, int8_strip(g->weight, buffers->rows, row, rows), table,
                                 buffers->chunk, buffers->total + row * PANEL, i, s->count);
}

/* Computes one panel for a block of rows: total [rows][32]. Strip by strip, whose inputs stay in the L1 cache; or, if
 * codes are unpacked, piece by piece of the panel. */
static void multiply_int8_panel(const Gemm *g, const Strips *s, const ThreadBuffers *buffers, long panel) {
    const Weight *w = g->weight;
    const CodeBytes *codes = int8_codes(buffers->rows);
    CodeTable table = load_code_table(codes->table);
    int unpacks = UNPACKS_CODES && codes->kind == SIX_BITS && s->count > 1 && w->group <= UNPACKED_CHUNK;
    long groups = group_count(w), at_once = max_long(UNPACKED_CHUNK / w->group, 1);
    for (long group = 0; unpacks && group < groups; group += at_once) {
        long end = min_long(group + at_once, groups);
        unpack_six_bits(w, panel, group, end, buffers->chunk);
        for (long i = 0; i < s->count; i++) add_strip(g, s, buffers, panel, group, end, table, i, UNPACKED);
    }
    for (long i = 0; !unpacks && i < s->count; i++) add_strip(g, s, buffers, panel, 0, groups, table, i, codes->kind);
}
