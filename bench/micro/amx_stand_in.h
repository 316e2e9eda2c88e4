/* Included before a C file that uses AMX. It replaces the tile instructions by instructions of
 * about the same cost, which give no result. A tile load reads 16 cache lines, a store writes 16, and a matrix product of
 * tiles keeps two multiply-add units busy for 16 cycles. */
#pragma once
#include <immintrin.h>
#include "amx_tiles.h"

#define STAND_IN static inline __attribute__((always_inline, unused))

STAND_IN void stand_in_load(const char *from, long stride) {
    for (int i = 0; i < 16; i++) {
        __m512i line = _mm512_loadu_si512(from + i * stride);
        __asm__ volatile("" ::"v"(line));
    }
}

STAND_IN void stand_in_store(char *to, long stride) {
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * stride, _mm512_setzero_si512());
    __asm__ volatile("" ::: "memory");
}

STAND_IN void stand_in_dot(void) {
    __m512 zero = _mm512_setzero_ps(), sum[8];
    for (int j = 0; j < 8; j++) sum[j] = zero;
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 8; j++) {
            sum[j] = _mm512_fmadd_ps(zero, zero, sum[j]);
            __asm__ volatile("" : "+v"(sum[j]));
        }
}

#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_ZERO
#undef TILE_DOT
#define TILE_LOAD(t, p, stride) stand_in_load((const char *)(p), stride)
#define TILE_STORE(t, p, stride) stand_in_store((char *)(p), stride)
#define TILE_ZERO(t) ((void)0)
#define TILE_DOT(c, a, b) stand_in_dot()
#define tiles_configure(shapes) ((void)(shapes))
#define tiles_release() ((void)0)
