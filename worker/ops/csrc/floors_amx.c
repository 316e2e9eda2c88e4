/* Measures the machine's peak rate of bf16 multiply-adds on AMX tiles. Python measures the time. */
#define SUFFIX amx
#include "amx_tiles.h"
#include "simd.h"

/* Every thread computes `rounds` * 4 products of a 16 x 32 matrix and a 32 x 16 matrix. */
EXPORT(floor_bf16)(long rounds, int threads) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
#pragma omp parallel num_threads(threads)
    {
        tiles_configure(&config);
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        TILE_ZERO(4);
        TILE_ZERO(5);
        TILE_ZERO(6);
        TILE_ZERO(7);
        for (long round = 0; round < rounds; round++) {
            TILE_DOT(0, 4, 6);
            TILE_DOT(1, 4, 7);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
        tiles_release();
    }
}
