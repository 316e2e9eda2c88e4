/* The gated delta rule: a layer that keeps one matrix per value head of a sequence instead of keys and values.
 *
 * worker/kernels/delta_net.py says what is computed. The state advances token by token, in one order of additions, so a
 * row has the same bits however the prompt is cut into chunks, and whatever else is in the step. Columns of a state are
 * independent of each other: a thread advances COLUMNS of them through all tokens of a sequence, and they stay in the
 * L1 cache meanwhile. */
#include "delta_net.h"
#include "convolution.h"
#include "state_columns.h"

#define MAX_KEY_DIM 256

INLINE long rows_of(const DeltaNet *n) { return n->query_start_loc[n->seqs]; }
INLINE long keys_width(const DeltaNet *n) { return n->key_heads * n->key_dim; }
INLINE long values_width(const DeltaNet *n) { return n->value_heads * n->value_dim; }
INLINE long channels(const DeltaNet *n) { return 2 * keys_width(n) + values_width(n); }
INLINE long width_of(const DeltaNet *n) { return channels(n) + values_width(n); } /* of a row of `projected` */
INLINE long blocks_of(const DeltaNet *n) { return (n->value_dim + COLUMNS - 1) / COLUMNS; }

INLINE Convolution convolution_of(const DeltaNet *n, long size) {
    return (Convolution){n->projected, width_of(n) * size, channels(n) * size, n->tails, n->conv, n->taps, channels(n),
                         n->seqs, n->read_slots, n->write_slots, n->query_start_loc};
}

static void scale_head(float *head, long d, float factor) {
    vf sum = {0};
    for (long i = 0; i < d; i += SIMD_WIDTH) {
        vf x = load(head, i, d, 0);
        sum += x * x;
    }
    vf scale = broadcast(factor / sqrtf(simd_sum(sum) + 1e-6f));
    for (long i = 0; i < d; i += SIMD_WIDTH) store(head, i, d, load(head, i, d, 0) * scale, 0);
}

/* Convolves a row, applies SiLU, and scales queries and keys to length 1, queries also by key_dim^-1/2. */
INLINE void mix_row(const DeltaNet *n, const Convolution *c, long row, int is_bf16) {
    long width = channels(n);
    const char *inputs[MAX_TAPS];
    float *out = n->mixed + row * width;
    find_inputs(c, row, inputs);
    for (long i = 0; i < width; i += SIMD_WIDTH) store(out, i, width, silu(convolved(c, inputs, i, is_bf16)), 0);
    for (long head = 0; head < 2 * n->key_heads; head++)
        scale_head(out + head * n->key_dim, n->key_dim, head < n->key_heads ? 1.0f / sqrtf(n->key_dim) : 1.0f);
    const char *at = n->gates + row * 2 * n->value_heads * (is_bf16 ? 2 : 4);
    float *rates = n->rates + row * 2 * n->value_heads;
    for (long head = 0; head < n->value_heads; head++) {
        float a = element(at, n->value_heads + head, is_bf16) + n->dt_bias[head];
        rates[head] = expf(n->decay[head] * softplus(a));
        rates[n->value_heads + head] = 1.0f / (1.0f + expf(-element(at, head, is_bf16)));
    }
}

/* Advances COLUMNS columns of a head's state through the tokens of a sequence. Results replace the values. */
static void advance_block(const DeltaNet *n, long seq, long head, long block) {
    static const float zeros[MAX_KEY_DIM * COLUMNS];
    long width = channels(n), size = n->key_dim * COLUMNS, at = (head * blocks_of(n) + block) * size;
    long slot = n->read_slots[seq], state = n->value_heads * blocks_of(n) * size, shared = n->value_heads / n->key_heads;
    const float *from = slot < 0 ? zeros : n->memories + slot * state + at;
    float *to = n->memories + n->write_slots[seq] * state + at;
    long first = block * COLUMNS, count = min_long(COLUMNS, n->value_dim - first);
    for (long row = n->query_start_loc[seq]; row < n->query_start_loc[seq + 1]; row++, from = to) {
        float *mixed = n->mixed + row * width, *value = mixed + 2 * keys_width(n) + head * n->value_dim + first;
        const float *query = mixed + head / shared * n->key_dim, *key = query + keys_width(n);
        const float *rates = n->rates + row * 2 * n->value_heads + head;
        float decay = rates[0], beta = rates[n->value_heads];
        Row delta, recalled = recall(from, key, n->key_dim);
        UNROLLED for (long j = 0; j < VECTORS; j++)
            delta.v[j] = (load(value, j * SIMD_WIDTH, count, 0) - recalled.v[j] * broadcast(decay)) * broadcast(beta);
        Row result = advance(from, to, decay, key, delta, query, n->key_dim);
        for (long j = 0; j * SIMD_WIDTH < count; j++) store(value, j * SIMD_WIDTH, count, result.v[j], 0);
    }
}

/* Applies the RMS norm to each head of the results, and multiplies by SiLU of the output gates. */
INLINE void norm_row(const DeltaNet *n, long row, int is_bf16) {
    long size = is_bf16 ? 2 : 4, d = n->value_dim;
    for (long head = 0; head < n->value_heads; head++) {
        const float *x = n->mixed + row * channels(n) + 2 * keys_width(n) + head * d;
        const char *gate = n->projected + (row * width_of(n) + channels(n) + head * d) * size;
        vf sum = {0};
        for (long i = 0; i < d; i += SIMD_WIDTH) {
            vf y = load(x, i, d, 0);
            sum += y * y;
        }
        vf scale = broadcast(1.0f / sqrtf(simd_sum(sum) / (float)d + n->eps));
        for (long i = 0; i < d; i += SIMD_WIDTH) {
            vf y = load(x, i, d, 0) * scale * load(n->norm, i, d, is_bf16) * silu(load(gate, i, d, is_bf16));
            store(n->out + (row * values_width(n) + head * d) * size, i, d, y, is_bf16);
        }
    }
}

#define DELTA_NET(dtype, is_bf16)                                                                                \
    NOINLINE void mix_row_##dtype(const DeltaNet *n, const Convolution *c, long row) {                           \
        mix_row(n, c, row, is_bf16);                                                                             \
    }                                                                                                            \
    NOINLINE void norm_row_##dtype(const DeltaNet *n, long row) { norm_row(n, row, is_bf16); }                   \
    EXPORT(delta_net_##dtype)(const DeltaNet *n) {                                                               \
        long rows = rows_of(n), blocks = n->seqs * n->value_heads * blocks_of(n);                                \
        Convolution c = convolution_of(n, is_bf16 ? 2 : 4);                                                      \
        _Pragma("omp parallel num_threads(n->threads)") {                                                        \
            _Pragma("omp for") for (long row = 0; row < rows; row++) mix_row_##dtype(n, &c, row);                \
            _Pragma("omp for nowait") for (long seq = 0; seq < n->seqs; seq++) keep_tail(&c, seq);               \
            _Pragma("omp for schedule(dynamic)") for (long unit = 0; unit < blocks; unit++) {                    \
                long head = unit / blocks_of(n);                                                                 \
                advance_block(n, head / n->value_heads, head % n->value_heads, unit % blocks_of(n));             \
            }                                                                                                    \
            _Pragma("omp for") for (long row = 0; row < rows; row++) norm_row_##dtype(n, row);                   \
        }                                                                                                        \
    }

DELTA_NET(f32, 0)
DELTA_NET(bf16, 1)
