/* Mamba-2: a layer whose state is one matrix per sequence and head, not a KV cache.
 *
 * worker/ops/recurrent/reference.py has the formulas. As in delta_net.c, the state advances token by token, so a row
 * has the same bits with every chunking of the prompt and with any other sequences in the step. */
#include "state_columns.h"

/* A row of `projected` holds output gates, x, b, c, in this order. A row of `gates` holds dt. `norm` is
 * [heads * columns]. Mamba2Struct in worker/ops/recurrent/native.py has the same fields, in the same order. */
typedef struct {
    MatrixLayer layer;
    const float *conv_bias; /* [channels] */
    const float *skip;      /* [heads]: D in the paper, the factor of x in the output */
    long groups;            /* how many groups there are; the heads of a group share b and c */
} Mamba2;

/* Convolves a row, adds the bias, and applies SiLU. Also computes the rates of each head (rates_of). */
INLINE void mix_row(const Mamba2 *n, const Convolution *c, long row, int is_bf16) {
    const MatrixLayer *l = &n->layer;
    const char *inputs[MAX_TAPS], *steps = c->step->gates + row * l->heads * (is_bf16 ? 2 : 4);
    float *out = mixed_of(l, c->step, row), *rates = rates_of(l, c->step, row);
    find_inputs(c, row, inputs);
    for (long i = 0; i < c->width; i += SIMD_WIDTH)
        store(out, i, c->width, silu(convolved(c, inputs, i, is_bf16, 1) + load(n->conv_bias, i, c->width, 0)), 0);
    for (long head = 0; head < l->heads; head++) {
        float dt = softplus(element(steps, head, is_bf16) + l->dt_bias[head]);
        rates[head] = expf(l->decay[head] * dt), rates[l->heads + head] = dt;
    }
}

/* Advances COLUMNS columns of a head's state through all tokens of a sequence. */
static void advance_block(const Mamba2 *n, const RecurrentStep *s, long seq, long head, long block) {
    const MatrixLayer *l = &n->layer;
    Block to = block_of(l, s, seq, head, block);
    for (long row = s->query_start_loc[seq]; row < s->query_start_loc[seq + 1]; row++, to.from = to.to) {
        float *mixed = mixed_of(l, s, row), *x = mixed + head * l->columns + to.first;
        const float *b = mixed + values_width(l) + head / (l->heads / n->groups) * l->keys;
        const float *c = b + n->groups * l->keys, *rates = rates_of(l, s, row) + head;
        Row delta;
        UNROLLED for (long j = 0; j < VECTORS; j++)
            delta.v[j] = load(x, j * SIMD_WIDTH, to.count, 0) * broadcast(rates[l->heads]);
        Row result = advance(to.from, to.to, rates[0], b, delta, c, l->keys);
        for (long j = 0; j * SIMD_WIDTH < to.count; j++)
            store(x, j * SIMD_WIDTH, to.count,
                  result.v[j] + load(x, j * SIMD_WIDTH, to.count, 0) * broadcast(n->skip[head]), 0);
    }
}

/* Multiplies a row's result by SiLU of the output gates, and applies the RMS norm to each group of heads. */
INLINE void norm_row(const Mamba2 *n, const RecurrentStep *s, long row, int is_bf16) {
    const MatrixLayer *l = &n->layer;
    long size = is_bf16 ? 2 : 4, all = values_width(l), d = all / n->groups;
    for (long first = 0; first < all; first += d) {
        float *x = mixed_of(l, s, row) + first;
        const char *gate = s->projected + (row * l->width + first) * size;
        vf sum = {0};
        for (long i = 0; i < d; i += SIMD_WIDTH) {
            vf y = load(x, i, d, 0) * silu(load(gate, i, d, is_bf16));
            store(x, i, d, y, 0);
            sum += y * y;
        }
        vf scale = broadcast(1.0f / sqrtf(simd_sum(sum) / (float)d + l->eps));
        for (long i = 0; i < d; i += SIMD_WIDTH)
            store(s->out + (row * all + first) * size, i, d,
                  load(x, i, d, 0) * scale * load(l->norm + first * size, i, d, is_bf16), is_bf16);
    }
}

MATRIX_LAYER(mamba2, Mamba2, f32, 0)
MATRIX_LAYER(mamba2, Mamba2, bf16, 1)
