/* Measures the machine's peak rate of bf16 multiply-adds with vdpbf16ps. Python measures the time. */
#include "simd.h"

#define CHAINS 12 /* independent sums: enough to hide the latency of vdpbf16ps; all fit in registers */

static volatile float used; /* keeps the compiler from removing the computation */

/* Every thread executes `rounds` * 12 instructions, which multiply two registers of 32 bf16 numbers each. */
EXPORT(floor_bf16)(long rounds, int threads) {
#pragma omp parallel num_threads(threads)
    {
        __m512 sums[CHAINS];
        __m512bh factor = (__m512bh)_mm512_set1_epi32(0x3c003c00); /* 2^-7, twice */
        for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_ps((float)i);
        for (long round = 0; round < rounds; round++)
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbf16_ps(sums[i], factor, factor);
        for (int i = 1; i < CHAINS; i++) sums[0] += sums[i];
        used = sums[0][0];
    }
}
