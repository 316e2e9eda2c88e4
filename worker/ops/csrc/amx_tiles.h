/* AMX tile instructions as macros. Tile numbers must be literals. Each macro has a memory clobber. */
#pragma once
#include <stdint.h>

#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((long)(stride)) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t::: "memory")
/* Computes tile c += tile a [rows x 32 bf16] times tile b [16 pairs x 16 columns x 2 bf16]. */
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::: "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

static inline void tiles_configure(const TileConfig *config) {
    __asm__ volatile("ldtilecfg %0" ::"m"(*config) : "memory");
}

/* Releases the tile state, so that a context switch does not have to save it. */
static inline void tiles_release(void) { __asm__ volatile("tilerelease" ::: "memory"); }
