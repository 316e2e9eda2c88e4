/* Included before a C source. It replaces AMX by plain functions (emulated_amx.c): the names
 * in amx_tiles.h that stand for instructions, and the two functions that ask the processor and the system about AMX. */
#pragma once
#include <cpuid.h>
#include "amx_tiles.h"
#include <unistd.h>

void emulated_configure(const TileConfig *shapes);
void emulated_release(void);
void emulated_zero(int tile);
void emulated_load(int tile, const void *from, long stride);
void emulated_store(int tile, void *to, long stride);
void emulated_dot(int sum, int rows, int columns);
int emulated_cpuid(unsigned leaf, unsigned part, unsigned *a, unsigned *b, unsigned *c, unsigned *d);
long emulated_syscall(long number, long what, long feature);

#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_ZERO
#undef TILE_DOT
#define TILE_LOAD(t, p, stride) emulated_load(t, p, stride)
#define TILE_STORE(t, p, stride) emulated_store(t, p, stride)
#define TILE_ZERO(t) emulated_zero(t)
#define TILE_DOT(c, a, b) emulated_dot(c, a, b)
#define tiles_configure emulated_configure
#define tiles_release emulated_release
#define __get_cpuid_count emulated_cpuid
#define syscall emulated_syscall
