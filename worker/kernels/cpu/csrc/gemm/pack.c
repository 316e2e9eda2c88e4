/* Packs weights [N, K] in the order in which the matmuls read them: panels of 32 rows, padded with zeros in N and K. */
#include <stdint.h>

enum { PANEL = 32, STEP = 32 };

static uint16_t element_or_zero(const uint16_t *weight, long n, long k, long row, long column) {
    return row < n && column < k ? weight[row * k + column] : 0;
}

/* [N/32][K/32][2 tiles][16 pairs][16 rows][2]; a step inside the weight is copied without bounds checks. */
static void pack_step(const uint16_t *weight, uint16_t *to, long n, long k, long row, long column) {
    int whole = row + PANEL <= n && column + STEP <= k;
    for (long r = 0; r < PANEL; r++)
        for (long c = 0; c < STEP; c++) {
            uint16_t value =
                whole ? weight[(row + r) * k + column + c] : element_or_zero(weight, n, k, row + r, column + c);
            to[r / 16 * 512 + c / 2 * 32 + r % 16 * 2 + c % 2] = value;
        }
}

__attribute__((visibility("default"))) void pack_bf16(const uint16_t *weight, uint16_t *to, long n, long k,
                                                      int threads) {
    long panels = (n + PANEL - 1) / PANEL, steps = (k + STEP - 1) / STEP;
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < panels; p++)
        for (long s = 0; s < steps; s++)
            pack_step(weight, to + (p * steps + s) * PANEL * STEP, n, k, p * PANEL, s * STEP);
}

/* [N/32][K][32] */
__attribute__((visibility("default"))) void pack_f32(const float *weight, float *to, long n, long k, int threads) {
    long panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads)
    for (long p = 0; p < panels; p++)
        for (long c = 0; c < k; c++)
            for (long r = p * PANEL; r < (p + 1) * PANEL; r++)
                to[(p * k + c) * PANEL + r % PANEL] = r < n ? weight[r * k + c] : 0;
}
