/* Measures the machine's peak rates of fp32 multiply-adds and of memory reads. Python measures the time. */
#include "simd.h"

#define CHAINS 12 /* independent sums: enough to hide the latency of a multiply-add; all fit in registers */

static volatile float used; /* keeps the compiler from removing the computation */

/* Every thread computes `rounds` * 12 multiply-adds of whole registers. */
EXPORT(floor_fp32)(long rounds, int threads) {
#pragma omp parallel num_threads(threads)
    {
        vf sums[CHAINS], factor = broadcast(0.999f), term = broadcast(0.001f);
        for (int i = 0; i < CHAINS; i++) sums[i] = broadcast((float)i);
        for (long round = 0; round < rounds; round++)
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) sums[i] = sums[i] * factor + term;
        for (int i = 1; i < CHAINS; i++) sums[0] += sums[i];
        used = sums[0][0];
    }
}

/* Reads `bytes` bytes once. Every thread reads a contiguous part of them. */
EXPORT(floor_read)(const char *from, long bytes, int threads) {
    long block = 8 * sizeof(vu);
#pragma omp parallel num_threads(threads)
    {
        vu sums[8] = {{0}};
#pragma omp for schedule(static)
        for (long at = 0; at < bytes / block; at++)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) sums[i] ^= *(const vu *)(from + at * block + i * sizeof(vu));
        for (int i = 1; i < 8; i++) sums[0] ^= sums[i];
        used = as_float(sums[0])[0];
    }
}
