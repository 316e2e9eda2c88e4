/* Detects which instruction sets the processor and the operating system support. Also advises the operating system on
 * huge pages and pre-faults memory. */
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __x86_64__
#include <cpuid.h>

enum { AVX2 = 1, AVXVNNI, AVX512, AVX512BF16, AMX };

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static int has_amx_bf16(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return 0; /* AMX-BF16, AMX-TILE */
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static int has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static int has_avx_vnni(void) {
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

/* Returns whether this machine can run the kernels of an instruction set. The numbers are indexes into the lists of
 * native_build.py. */
__attribute__((visibility("default"))) int supports(int instruction_set) {
    __builtin_cpu_init();
    switch (instruction_set) {
    case AVX2: return has_avx2();
    case AVXVNNI: return has_avx_vnni();
    case AVX512: return has_avx512();
    case AVX512BF16: return has_avx512() && __builtin_cpu_supports("avx512bf16");
    case AMX: return has_avx512() && __builtin_cpu_supports("avx512bf16") && has_amx_bf16();
    default: return 0;
    }
}
#else
#include <sys/auxv.h>

enum { NEON = 1, DOTPROD };

/* Every 64-bit ARM processor has NEON. */
__attribute__((visibility("default"))) int supports(int instruction_set) {
    return instruction_set == NEON || (instruction_set == DOTPROD && getauxval(AT_HWCAP) & HWCAP_ASIMDDP);
}
#endif

/* Requests huge pages for memory that is read from end to end. If the system grants no huge pages, reads are only
 * slower. */
__attribute__((visibility("default"))) void advise_huge_pages(void *start, long bytes) {
    uintptr_t page = 1 << 21, from = ((uintptr_t)start + page - 1) / page * page;
    uintptr_t to = ((uintptr_t)start + bytes) / page * page;
    if (to > from) madvise((void *)from, to - from, MADV_HUGEPAGE);
}

/* Makes the operating system allocate all pages of a range: it writes to every page without changing a byte, so other
 * threads may use the memory meanwhile. (MADV_POPULATE_WRITE would hold the lock on all of the process's mappings, even
 * at low priority.) */
__attribute__((visibility("default"))) void touch_pages(uintptr_t start, long bytes, long page) {
    for (uintptr_t at = start; at < start + bytes; at += page) __atomic_fetch_or((unsigned *)at, 0, __ATOMIC_RELAXED);
}
