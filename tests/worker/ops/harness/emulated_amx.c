/* Emulates AMX's tile instructions by Intel's manual (volume 2: LDTILECFG, TILELOADD, TDPBF16PS, ...), on eight tiles per
 * thread. Where a processor would fault, the first reason is kept and the instruction does nothing. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define NAMES 8
#define MOST_ROWS 16
#define MOST_BYTES 64
#define SHOWN __attribute__((visibility("default")))
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Shapes;

typedef struct {
    int rows, bytes; /* bytes: size of a row. 0 rows: the tile is not in use */
    _Alignas(64) uint8_t data[MOST_ROWS][MOST_BYTES];
} Tile;

static _Thread_local struct {
    int configured;
    Tile tile[NAMES];
} own;

static struct {
    long configurations, zeros, loads, stores, dots; /* numbers of instructions */
    long lines;                                      /* cache lines that loads touched, counted for each row */
} counts;

static int has_amx = 1, grants = 1, permitted;
static char reason[128]; /* reason of the first fault */

static int fault(const char *instruction, const char *why) {
    if (!reason[0]) snprintf(reason, sizeof reason, "%s: %s", instruction, why);
    return 1;
}

static void count(long *which, long more) { __atomic_fetch_add(which, more, __ATOMIC_RELAXED); }

static int all_zero(const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)from)[i]) return 0;
    return 1;
}

/* Linux ends a process that uses tiles without having asked for the permission. */
static int forbidden(const char *instruction) {
    return !__atomic_load_n(&permitted, __ATOMIC_RELAXED) && fault(instruction, "the system was not asked");
}

SHOWN void emulated_configure(const Shapes *s) {
    if (forbidden("ldtilecfg")) return;
    if (s->palette != 1 || s->start_row || !all_zero(s->reserved, sizeof s->reserved) ||
        !all_zero(s->bytes + NAMES, 2 * NAMES) || !all_zero(s->rows + NAMES, NAMES)) {
        fault("ldtilecfg", "no such palette, or reserved bytes that are not zero");
        return;
    }
    for (int i = 0; i < NAMES; i++)
        if (s->rows[i] > MOST_ROWS || s->bytes[i] > MOST_BYTES || !s->rows[i] != !s->bytes[i]) {
            fault("ldtilecfg", "rows or bytes out of range");
            return;
        }
    memset(&own, 0, sizeof own);
    own.configured = 1;
    for (int i = 0; i < NAMES; i++) own.tile[i].rows = s->rows[i], own.tile[i].bytes = s->bytes[i];
    count(&counts.configurations, 1);
}

SHOWN void emulated_release(void) { memset(&own, 0, sizeof own); }

/* Returns the tile, or NULL after a fault. */
static Tile *usable(const char *instruction, int tile) {
    if (forbidden(instruction)) return NULL;
    if (!own.configured || tile < 0 || tile >= NAMES || !own.tile[tile].rows) {
        fault(instruction, "a tile that is not configured");
        return NULL;
    }
    return &own.tile[tile];
}

SHOWN void emulated_zero(int tile) {
    Tile *t = usable("tilezero", tile);
    if (!t) return;
    memset(t->data, 0, sizeof t->data);
    count(&counts.zeros, 1);
}

SHOWN void emulated_load(int tile, const void *from, long stride) {
    Tile *t = usable("tileloadd", tile);
    if (!t) return;
    long lines = 0;
    memset(t->data, 0, sizeof t->data);
    for (long i = 0; i < t->rows; i++) {
        uintptr_t row = (uintptr_t)from + i * stride;
        memcpy(t->data[i], (const void *)row, t->bytes);
        lines += (row + t->bytes - 1) / 64 - row / 64 + 1;
    }
    count(&counts.loads, 1);
    count(&counts.lines, lines);
}

SHOWN void emulated_store(int tile, void *to, long stride) {
    Tile *t = usable("tilestored", tile);
    if (!t) return;
    for (long i = 0; i < t->rows; i++) memcpy((char *)to + i * stride, t->data[i], t->bytes);
    count(&counts.stores, 1);
}

/* Return the even and the odd numbers of the pairs, as fp32. */
static __m512 even(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
static __m512 odd(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)); }

/* One row: one chain of fused multiply-adds over the even numbers, one over the odd, both from zero. Adds their sum. */
static __attribute__((noinline)) void dot_row(const uint8_t *row, int pairs, const Tile *columns, uint8_t *sum) {
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int k = 0; k < pairs; k++) {
        int32_t pair;
        memcpy(&pair, row + 4 * k, 4);
        __m512i left = _mm512_set1_epi32(pair), right = _mm512_load_si512(columns->data[k]);
        evens = _mm512_fmadd_ps(even(left), even(right), evens);
        odds = _mm512_fmadd_ps(odd(left), odd(right), odds);
    }
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(evens, odds)));
}

SHOWN void emulated_dot(int sum, int rows, int columns) {
    Tile *c = usable("tdpbf16ps", sum), *a = usable("tdpbf16ps", rows), *b = usable("tdpbf16ps", columns);
    if (!a || !b || !c) return;
    if (a == b || a == c || b == c) {
        fault("tdpbf16ps", "one tile twice");
        return;
    }
    if (c->rows != a->rows || a->bytes / 4 != b->rows || b->bytes != c->bytes || (a->bytes | b->bytes) % 4) {
        fault("tdpbf16ps", "shapes that do not fit");
        return;
    }
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* as in AMX: rounds to nearest even, denormals are zeros, no exceptions */
    for (int i = 0; i < c->rows; i++) {
        dot_row(a->data[i], a->bytes / 4, b, c->data[i]);
        memset(c->data[i] + c->bytes, 0, MOST_BYTES - c->bytes);
    }
    _mm_setcsr(before);
    count(&counts.dots, 1);
}

/* Replace the two functions by which cpu_features.c asks the processor and the system about AMX. */
SHOWN int emulated_cpuid(unsigned leaf, unsigned part, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    *a = *b = *c = 0;
    *d = leaf == 7 && part == 0 && has_amx ? 1u << 22 | 1u << 24 : 0;
    return 1;
}

SHOWN long emulated_syscall(long number, long what, long feature) {
    (void)number;
    if (!grants || what != ARCH_REQ_XCOMP_PERM || feature != XFEATURE_XTILEDATA) return -1;
    __atomic_store_n(&permitted, 1, __ATOMIC_RELAXED); /* for the whole process, including later threads */
    return 0;
}

/* For tests: simulates a processor with or without AMX and a system that grants it or not. Revokes the permission. */
SHOWN void emulated_machine(int amx, int granting) { has_amx = amx, grants = granting, permitted = 0; }

/* Returns why a processor would have faulted since the last call; empty if it would not have. */
SHOWN const char *emulated_fault(void) {
    static char last[sizeof reason];
    memcpy(last, reason, sizeof last);
    reason[0] = 0;
    return last;
}

/* Returns the counts since the last call: configurations, zeros, loads, stores, dots, cache lines of loads. */
SHOWN void emulated_counts(long *to) {
    memcpy(to, &counts, sizeof counts);
    memset(&counts, 0, sizeof counts);
}
