/* Work stealing for matrix products. A unit of work is one block of rows times one panel of weights. Units are ordered
 * by block, then by panel. Every thread starts with a contiguous range of units, so it reads weights in long sequential
 * streams. A thread whose range is empty takes the upper half of another thread's range. */
#pragma once
#include "simd.h"

typedef struct {
    _Alignas(64) uint64_t units; /* low 32 bits: first unit; high 32 bits: end */
} WorkRange;

INLINE uint64_t pack_range(uint64_t from, uint64_t to) { return to << 32 | from; }

/* Returns the next unit for this thread, or -1 when none is left. Each unit is taken only once, so a range never has
 * the same non-empty value twice. A successful compare-and-swap therefore proves that the range has not changed since
 * it was read (no ABA problem). */
static long take_unit(WorkRange *ranges, int thread, int threads) {
    for (int i = 0; i < threads;) {
        WorkRange *range = &ranges[(thread + i) % threads];
        uint64_t seen = __atomic_load_n(&range->units, __ATOMIC_RELAXED), from = (uint32_t)seen, to = seen >> 32;
        uint64_t unit = i ? from + (to - from) / 2 : from, left = i ? pack_range(from, unit) : pack_range(from + 1, to);
        if (from >= to)
            i++;
        else if (__atomic_compare_exchange_n(&range->units, &seen, left, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            if (i) __atomic_store_n(&ranges[thread].units, pack_range(unit + 1, to), __ATOMIC_RELAXED);
            return unit;
        }
    }
    return -1;
}

INLINE void split_work(WorkRange *ranges, long units, int threads) {
    for (int i = 0; i < threads; i++) ranges[i].units = pack_range(units * i / threads, units * (i + 1) / threads);
}
