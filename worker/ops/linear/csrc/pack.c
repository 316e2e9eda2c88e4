/* Packs weights [N, K] in the order in which the matmuls read them: panels of 32 rows, padded with zeros in N and K.
 *
 * It transposes a square of 16 rows x 16 32-bit words at a time, which touches only a few cache lines. A word is an
 * fp32 number or a pair of bf16 numbers. */
#include <stdint.h>
#include <string.h>

enum { PANEL = 32, STEP = 32, TILE = 16 };

typedef uint32_t Tile[TILE][TILE]; /* [rows][words]: the words of 64 bytes of each row, zeros outside of the weight */

/* Copies a tile of a weight. rows: how many rows of the tile are inside the weight; bytes: how many bytes of each row
 * are inside; stride: bytes of a row of the weight. */
static void copy_tile(Tile tile, const char *weight, long rows, long bytes, long stride) {
    bytes = bytes < (long)sizeof(tile[0]) ? bytes : (long)sizeof(tile[0]);
    if (rows < TILE || bytes < (long)sizeof(tile[0])) memset(tile, 0, sizeof(Tile));
    if (bytes <= 0) return;
    for (long r = 0; r < TILE && r < rows; r++)
        if (bytes == sizeof(tile[0]))
            memcpy(tile[r], weight + r * stride, sizeof(tile[0]));
        else
            memcpy(tile[r], weight + r * stride, bytes);
}

/* Stores the first `words` columns of a tile. Each column becomes 16 neighbouring words; columns are `stride` words
 * apart. */
static void store_transposed(Tile tile, uint32_t *to, long words, long stride) {
    for (long i = 0; i < words; i++)
        for (long r = 0; r < TILE; r++) to[i * stride + r] = tile[r][i];
}

/* Packs to [N/32][K/32][2 tiles][16 pairs][16 rows][2]. */
__attribute__((visibility("default"))) void pack_bf16(const uint16_t *weight, uint16_t *to, long n, long k,
                                                      int threads) {
    long panels = (n + PANEL - 1) / PANEL, steps = (k + STEP - 1) / STEP;
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < panels; p++)
        for (long s = 0; s < steps; s++)
            for (long row = p * PANEL; row < (p + 1) * PANEL; row += TILE) {
                Tile tile;
                copy_tile(tile, (const char *)(weight + row * k + s * STEP), n - row, (k - s * STEP) * 2, k * 2);
                uint16_t *half = to + ((p * steps + s) * PANEL + row % PANEL) * STEP;
                store_transposed(tile, (uint32_t *)half, TILE, TILE);
            }
}

/* Packs to [N/32][K][32]. */
__attribute__((visibility("default"))) void pack_f32(const float *weight, float *to, long n, long k, int threads) {
    long panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < panels; p++)
        for (long c = 0; c < k; c += TILE)
            for (long row = p * PANEL; row < (p + 1) * PANEL; row += TILE) {
                Tile tile;
                copy_tile(tile, (const char *)(weight + row * k + c), n - row, (k - c) * 4, k * 4);
                uint32_t *half = (uint32_t *)to + (p * k + c) * PANEL + row % PANEL;
                store_transposed(tile, half, k - c < TILE ? k - c : TILE, PANEL);
            }
}
