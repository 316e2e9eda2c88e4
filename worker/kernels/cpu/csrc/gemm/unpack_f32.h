/* Unpacks a panel's numbers [inputs][32 columns] to fp32, for kernels that multiply in fp32. */
#pragma once
#include "gemm/unpack.h"

#define PANEL_REGISTERS (PANEL / SIMD_WIDTH)
#define PREFETCH_BYTES 4096 /* how far ahead of use codes are prefetched */

INLINE void load_group_f32(const Weight *w, const char *head, GroupNumbers *to) {
    for (long c = 0; c < PANEL; c += SIMD_WIDTH) {
        store_f32(to->scale + c, load_number(w, head, c));
        store_f32(to->minimum + c, w->has_minimum ? load_number(w, head + PANEL * w->scale_bytes, c) : broadcast(0));
    }
}

INLINE vf scaled(vf value, const GroupNumbers *group, int j, int has_minimum) {
    vf scale = load_f32(group->scale + j * SIMD_WIDTH);
    return has_minimum ? value * scale + load_f32(group->minimum + j * SIMD_WIDTH) : value * scale;
}

/* Unpacks one block of 16 inputs. */
INLINE void unpack_block_f32(const char *codes, const GroupNumbers *group, float *to, Table table, int kind,
                             int has_minimum) {
    if (kind == INT8 || kind == E4M3) {
        for (int i = 0; i < CODE_BLOCK; i++)
            for (int j = 0; j < PANEL_REGISTERS; j++) {
                vf value = byte_values((const uint8_t *)codes + i * PANEL + j * SIMD_WIDTH, kind);
                store_f32(to + i * PANEL + j * SIMD_WIDTH, scaled(value, group, j, has_minimum));
            }
        return;
    }
    for (int octet = 0; octet < 2; octet++, to += 8 * PANEL)
        for (int j = 0; j < PANEL_REGISTERS; j++) {
            vu words;
            __builtin_memcpy(&words, codes + (octet * PANEL + j * SIMD_WIDTH) * 4, sizeof words);
            for (int i = 0; i < 8; i++)
                store_f32(to + i * PANEL + j * SIMD_WIDTH,
                          scaled(nibble_values(words, i, kind, table), group, j, has_minimum));
        }
}

/* Unpacks `count` inputs from `from` on; both are multiples of CODE_BLOCK, except the end of the last chunk. */
INLINE void unpack_codes_f32(const Weight *w, long panel, long from, long count, float *to, int kind, int has_minimum) {
    Table table = load_table(w);
    GroupNumbers numbers;
    long group = -1, block_bytes = code_block_bytes(w);
    for (long k = from; k < from + count; k += CODE_BLOCK, to += CODE_BLOCK * PANEL) {
        const char *head = group_at(w, panel, k / w->group);
        if (k / w->group != group) load_group_f32(w, head, &numbers);
        group = k / w->group;
        const char *codes = head + group_head_bytes(w) + (k - group * w->group) / CODE_BLOCK * block_bytes;
        for (long i = 0; i < block_bytes; i += 64) __builtin_prefetch(codes + PREFETCH_BYTES + i, 0, 3);
        unpack_block_f32(codes, &numbers, to, table, kind, has_minimum);
    }
}

INLINE vf even_floats(vu pairs) { return as_float(pairs << 16); }
INLINE vf odd_floats(vu pairs) { return as_float(pairs & 0xffff0000u); }

/* Unpacks pairs of bf16 numbers. `from` is a multiple of 32. */
INLINE void unpack_pairs_f32(const Weight *w, long panel, long from, long count, float *to) {
    const char *panel_start = w->panels + panel * ceil_div(w->k, 32) * 2048;
    for (long i = from / 2; i < (from + count + 1) / 2; i++, to += 2 * PANEL) {
        const char *pairs = panel_start + i / 16 * 2048 + i % 16 * 64;
        __builtin_prefetch(pairs + PREFETCH_BYTES, 0, 3);
        __builtin_prefetch(pairs + PREFETCH_BYTES + 1024, 0, 3);
        for (int j = 0; j < PANEL_REGISTERS; j++) {
            int column = j * SIMD_WIDTH;
            vu words;
            __builtin_memcpy(&words, pairs + column / 16 * 1024 + column % 16 * 4, sizeof words);
            store_f32(to + column, even_floats(words));
            store_f32(to + PANEL + column, odd_floats(words));
        }
    }
}
