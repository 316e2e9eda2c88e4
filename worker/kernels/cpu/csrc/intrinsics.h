/* The intrinsics of AVX2, and what else differs between processors.
 *
 * On processors other than x86-64, SIMDe (https://github.com/simd-everywhere/simde) has functions with the names of the
 * intrinsics, and makes them of the processor's own instructions: an instruction of AVX2 becomes two of NEON. So the
 * kernels are the same source there, and compute the same bits. */
#pragma once
#include <stdint.h>

#ifdef __x86_64__
#include <immintrin.h>
#define USES_AVX2 __attribute__((target("avx2,f16c"))) /* for functions in files that are compiled for any x86-64 */
#else
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#define USES_AVX2
#endif

/* Makes this thread take denormals for zeros, in operands and results, until it is switched off. */
static inline void flush_denormals(int on) {
#ifdef __x86_64__
    _mm_setcsr(on ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u);
#else
    uint64_t mode, flush = 1 << 24;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" ::"r"(on ? mode | flush : mode & ~flush));
#endif
}

/* Tells the processor that this thread polls for another one. */
static inline void spin(void) {
#ifdef __x86_64__
    _mm_pause();
#else
    __asm__ volatile("yield");
#endif
}
