/* How threads share a product: a row of units, block of rows by block of rows, and in each panel by panel. A thread begins
 * with a stretch of its own, so that weights are read in long streams; what it has left when another is done, they halve. */
#pragma once
#include "simd.h"

typedef struct {
    _Alignas(64) uint64_t units; /* from the low half to the high one */
} Share;

INLINE uint64_t stretch(uint64_t from, uint64_t to) { return to << 32 | from; }

/* This thread's next unit; -1 when none is left. A unit is taken once, so no stretch comes back while someone looks. */
static long take_unit(Share *shares, int self, int threads) {
    for (int i = 0; i < threads;) {
        Share *share = &shares[(self + i) % threads];
        uint64_t seen = __atomic_load_n(&share->units, __ATOMIC_RELAXED), from = (uint32_t)seen, to = seen >> 32;
        uint64_t unit = i ? from + (to - from) / 2 : from, left = i ? stretch(from, unit) : stretch(from + 1, to);
        if (from >= to) i++;
        else if (__atomic_compare_exchange_n(&share->units, &seen, left, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            if (i) __atomic_store_n(&shares[self].units, stretch(unit + 1, to), __ATOMIC_RELAXED);
            return unit;
        }
    }
    return -1;
}

INLINE void share_out(Share *shares, long units, int threads) {
    for (int i = 0; i < threads; i++) shares[i].units = stretch(units * i / threads, units * (i + 1) / threads);
}
