/* The gated delta rule (Gated DeltaNet): a layer whose state is one matrix per sequence and value head, not a KV cache.
 *
 * worker/ops/recurrent/reference.py has the formulas. The state advances token by token, with a fixed order of
 * additions. So a row has the same bits with every chunking of the prompt and with any other sequences in the step. The
 * columns of a state are independent of each other: a thread advances COLUMNS columns through all tokens of a sequence,
 * and keeps them in the L1 cache meanwhile. */
#include "state_columns.h"

/* A row of `projected` holds queries, keys, values, output gates, in this order. A row of `gates` holds b, then a.
 * `norm` is [columns]. DeltaNetStruct in worker/ops/recurrent/native.py has the same fields, in the same
 * order. */
typedef struct {
    MatrixLayer layer; /* layer.heads: value heads */
    long key_heads;
} DeltaNet;

INLINE long keys_width(const DeltaNet *n) { return n->key_heads * n->layer.keys; }

static void scale_head(float *head, long d, float factor) {
    vf sum = {0};
    for (long i = 0; i < d; i += SIMD_WIDTH) {
        vf x = load(head, i, d, 0);
        sum += x * x;
    }
    vf scale = broadcast(factor / sqrtf(simd_sum(sum) + 1e-6f));
    for (long i = 0; i < d; i += SIMD_WIDTH) store(head, i, d, load(head, i, d, 0) * scale, 0);
}

/* Convolves a row, applies SiLU, and scales each query and key to length 1. Queries are also scaled by key_dim^-1/2.
 * Also computes the rates of each head (rates_of). */
INLINE void mix_row(const DeltaNet *n, const Convolution *c, long row, int is_bf16) {
    const MatrixLayer *l = &n->layer;
    const char *inputs[MAX_TAPS], *at = c->step->gates + row * 2 * l->heads * (is_bf16 ? 2 : 4);
    float *out = mixed_of(l, c->step, row), *rates = rates_of(l, c->step, row);
    find_inputs(c, row, inputs);
    for (long i = 0; i < c->width; i += SIMD_WIDTH)
        store(out, i, c->width, silu(convolved(c, inputs, i, is_bf16, 1)), 0);
    for (long head = 0; head < 2 * n->key_heads; head++)
        scale_head(out + head * l->keys, l->keys, head < n->key_heads ? 1.0f / sqrtf(l->keys) : 1.0f);
    for (long head = 0; head < l->heads; head++) {
        float a = element(at, l->heads + head, is_bf16) + l->dt_bias[head];
        rates[head] = expf(l->decay[head] * softplus(a));
        rates[l->heads + head] = 1.0f / (1.0f + expf(-element(at, head, is_bf16)));
    }
}

/* Advances COLUMNS columns of a head's state through all tokens of a sequence. */
static void advance_block(const DeltaNet *n, const RecurrentStep *s, long seq, long head, long block) {
    const MatrixLayer *l = &n->layer;
    Block b = block_of(l, s, seq, head, block);
    for (long row = s->query_start_loc[seq]; row < s->query_start_loc[seq + 1]; row++, b.from = b.to) {
        float *mixed = mixed_of(l, s, row), *value = mixed + 2 * keys_width(n) + head * l->columns + b.first;
        const float *query = mixed + head / (l->heads / n->key_heads) * l->keys, *key = query + keys_width(n);
        const float *rates = rates_of(l, s, row) + head;
        float decay = rates[0], beta = rates[l->heads];
        Row delta, recalled = recall(b.from, key, l->keys);
        UNROLLED for (long j = 0; j < VECTORS; j++)
            delta.v[j] = (load(value, j * SIMD_WIDTH, b.count, 0) - recalled.v[j] * broadcast(decay)) * broadcast(beta);
        Row result = advance(b.from, b.to, decay, key, delta, query, l->keys);
        for (long j = 0; j * SIMD_WIDTH < b.count; j++) store(value, j * SIMD_WIDTH, b.count, result.v[j], 0);
    }
}

/* Applies the RMS norm to each head of a row's result, and multiplies it by SiLU of the output gates. */
INLINE void norm_row(const DeltaNet *n, const RecurrentStep *s, long row, int is_bf16) {
    const MatrixLayer *l = &n->layer;
    long size = is_bf16 ? 2 : 4, d = l->columns;
    for (long head = 0; head < l->heads; head++) {
        const float *x = mixed_of(l, s, row) + 2 * keys_width(n) + head * d;
        const char *gate = s->projected + (row * l->width + l->channels + head * d) * size;
        vf sum = {0};
        for (long i = 0; i < d; i += SIMD_WIDTH) {
            vf y = load(x, i, d, 0);
            sum += y * y;
        }
        vf scale = broadcast(1.0f / sqrtf(simd_sum(sum) / (float)d + l->eps));
        for (long i = 0; i < d; i += SIMD_WIDTH) {
            vf y = load(x, i, d, 0) * scale * load(l->norm, i, d, is_bf16) * silu(load(gate, i, d, is_bf16));
            store(s->out + (row * values_width(l) + head * d) * size, i, d, y, is_bf16);
        }
    }
}

MATRIX_LAYER(delta_net, DeltaNet, f32, 0)
MATRIX_LAYER(delta_net, DeltaNet, bf16, 1)
