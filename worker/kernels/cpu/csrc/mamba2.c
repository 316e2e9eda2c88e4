/* Mamba-2: a layer that keeps one matrix per head of a sequence instead of keys and values.
 *
 * worker/kernels/mamba2.py says what is computed. As in delta_net.c, the state advances token by token, so a row has the
 * same bits however the prompt is cut into chunks, and whatever else is in the step. */
#include "mamba2.h"
#include "convolution.h"
#include "state_columns.h"

INLINE long values_width(const Mamba2 *n) { return n->heads * n->head_dim; }
INLINE long channels(const Mamba2 *n) { return values_width(n) + 2 * n->groups * n->state_size; }
INLINE long width_of(const Mamba2 *n) { return values_width(n) + channels(n); } /* of a row of `projected` */
INLINE long blocks_of(const Mamba2 *n) { return (n->head_dim + COLUMNS - 1) / COLUMNS; }

INLINE Convolution convolution_of(const Mamba2 *n, long size) {
    return (Convolution){n->projected + values_width(n) * size, width_of(n) * size, channels(n) * size, n->tails,
                         n->conv, n->taps, channels(n), n->seqs, n->read_slots, n->write_slots, n->query_start_loc};
}

/* Convolves a row, adds the bias, and applies SiLU. */
INLINE void mix_row(const Mamba2 *n, const Convolution *c, long row, int is_bf16) {
    long width = channels(n);
    const char *inputs[MAX_TAPS], *steps = n->steps + row * n->heads * (is_bf16 ? 2 : 4);
    float *out = n->mixed + row * width, *rates = n->rates + row * 2 * n->heads;
    find_inputs(c, row, inputs);
    for (long i = 0; i < width; i += SIMD_WIDTH)
        store(out, i, width, silu(convolved(c, inputs, i, is_bf16) + load(n->conv_bias, i, width, 0)), 0);
    for (long head = 0; head < n->heads; head++) {
        float dt = softplus(element(steps, head, is_bf16) + n->dt_bias[head]);
        rates[head] = expf(n->decay[head] * dt), rates[n->heads + head] = dt;
    }
}

/* Advances COLUMNS columns of a head's state through the tokens of a sequence. Results replace x. */
static void advance_block(const Mamba2 *n, long seq, long head, long block) {
    long width = channels(n), size = n->state_size * COLUMNS, at = (head * blocks_of(n) + block) * size;
    long slot = n->read_slots[seq], state = n->heads * blocks_of(n) * size;
    const float *from = n->memories + slot * state + at;
    float *to = n->memories + n->write_slots[seq] * state + at;
    long first = block * COLUMNS, count = min_long(COLUMNS, n->head_dim - first);
    if (slot < 0) from = memset(to, 0, size * sizeof(float));
    for (long row = n->query_start_loc[seq]; row < n->query_start_loc[seq + 1]; row++, from = to) {
        float *mixed = n->mixed + row * width, *x = mixed + head * n->head_dim + first;
        const float *b = mixed + values_width(n) + head / (n->heads / n->groups) * n->state_size;
        const float *c = b + n->groups * n->state_size, *rates = n->rates + row * 2 * n->heads + head;
        Row delta;
        UNROLLED for (long j = 0; j < VECTORS; j++)
            delta.v[j] = load(x, j * SIMD_WIDTH, count, 0) * broadcast(rates[n->heads]);
        Row result = advance(from, to, rates[0], b, delta, c, n->state_size);
        for (long j = 0; j * SIMD_WIDTH < count; j++)
            store(x, j * SIMD_WIDTH, count,
                  result.v[j] + load(x, j * SIMD_WIDTH, count, 0) * broadcast(n->skip[head]), 0);
    }
}

/* Multiplies the results by SiLU of the output gates, and applies the RMS norm to each group of heads. */
INLINE void norm_row(const Mamba2 *n, long row, int is_bf16) {
    long size = is_bf16 ? 2 : 4, all = values_width(n), d = all / n->groups;
    for (long first = 0; first < all; first += d) {
        float *x = n->mixed + row * channels(n) + first;
        const char *gate = n->projected + (row * width_of(n) + first) * size;
        vf sum = {0};
        for (long i = 0; i < d; i += SIMD_WIDTH) {
            vf y = load(x, i, d, 0) * silu(load(gate, i, d, is_bf16));
            store(x, i, d, y, 0);
            sum += y * y;
        }
        vf scale = broadcast(1.0f / sqrtf(simd_sum(sum) / (float)d + n->eps));
        for (long i = 0; i < d; i += SIMD_WIDTH)
            store(n->out + (row * all + first) * size, i, d,
                  load(x, i, d, 0) * scale * load(n->norm + first * size, i, d, is_bf16), is_bf16);
    }
}

#define MAMBA2(dtype, is_bf16)                                                                                    \
    NOINLINE void mix_row_##dtype(const Mamba2 *n, const Convolution *c, long row) { mix_row(n, c, row, is_bf16); } \
    NOINLINE void norm_row_##dtype(const Mamba2 *n, long row) { norm_row(n, row, is_bf16); }                      \
    EXPORT(mamba2_##dtype)(const Mamba2 *n) {                                                                     \
        long rows = n->query_start_loc[n->seqs], blocks = n->seqs * n->heads * blocks_of(n);                      \
        Convolution c = convolution_of(n, is_bf16 ? 2 : 4);                                                       \
        _Pragma("omp parallel num_threads(n->threads)") {                                                         \
            _Pragma("omp for") for (long row = 0; row < rows; row++) mix_row_##dtype(n, &c, row);                 \
            _Pragma("omp for nowait") for (long seq = 0; seq < n->seqs; seq++) keep_tail(&c, seq);                \
            _Pragma("omp for schedule(dynamic)") for (long unit = 0; unit < blocks; unit++) {                     \
                long head = unit / blocks_of(n);                                                                  \
                advance_block(n, head / n->heads, head % n->heads, unit % blocks_of(n));                          \
            }                                                                                                     \
            _Pragma("omp for") for (long row = 0; row < rows; row++) norm_row_##dtype(n, row);                    \
        }                                                                                                         \
    }

MAMBA2(f32, 0)
MAMBA2(bf16, 1)
