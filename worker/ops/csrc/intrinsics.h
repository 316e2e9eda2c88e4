/* The AVX2 intrinsics, and helper functions whose implementation differs between processors.
 *
 * On processors other than x86-64, SIMDe (https://github.com/simd-everywhere/simde) implements the AVX2 intrinsics with
 * the processor's own instructions: one AVX2 instruction becomes two NEON instructions. So all processors compile the
 * same kernel sources, and the kernels compute the same bits. */
#pragma once
#include <stdint.h>

#ifdef __x86_64__
#include <immintrin.h>
#define USES_AVX2 __attribute__((target("avx2,f16c"))) /* marks functions that need AVX2 in files that are compiled for
                                                          any x86-64 */
#else
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#define USES_AVX2
#endif

/* Switches on (1) or off (0) whether this thread treats denormal operands and results as zeros. */
static inline void flush_denormals(int on) {
#ifdef __x86_64__
    _mm_setcsr(on ? _mm_getcsr() | 0x8040 : _mm_getcsr() & ~0x8040u);
#else
    uint64_t mode, flush = 1 << 24;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" ::"r"(on ? mode | flush : mode & ~flush));
#endif
}

/* Tells the processor that this thread is waiting in a busy loop. */
static inline void spin(void) {
#ifdef __x86_64__
    _mm_pause();
#else
    __asm__ volatile("yield");
#endif
}
