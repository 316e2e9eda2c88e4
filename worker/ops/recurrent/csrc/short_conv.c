/* The short convolution layer of LFM2. worker/ops/recurrent/reference.py has the formulas. */
#include "convolution.h"

/* A row of `projected` holds b, c, x, in this order. There are no gates. `scratch` holds the convolution's inputs
 * [T, channels]. ShortConvStruct in worker/ops/recurrent/native.py has the same fields, in the same
 * order. */
typedef struct {
    const float *conv; /* [taps, channels] */
    char *tails;       /* [slots, taps - 1, channels]: the last inputs */
    long channels, taps;
} ShortConv;

/* Computes the convolution's inputs for a row: b * x. */
INLINE void input_row(const ShortConv *n, const RecurrentStep *s, long row, int is_bf16) {
    long bytes = n->channels * (is_bf16 ? 2 : 4);
    const char *b = s->projected + row * 3 * bytes, *x = b + 2 * bytes;
    for (long i = 0; i < n->channels; i += SIMD_WIDTH)
        store((char *)s->scratch + row * bytes, i, n->channels,
              load(b, i, n->channels, is_bf16) * load(x, i, n->channels, is_bf16), is_bf16);
}

/* Computes the outputs of a row. Every product is rounded, as in the Triton and PyTorch versions. */
INLINE void output_row(const Convolution *convolution, long row, int is_bf16) {
    const RecurrentStep *s = convolution->step;
    long bytes = convolution->bytes, channels = convolution->width;
    const char *inputs[MAX_TAPS], *c = s->projected + (row * 3 + 1) * bytes;
    find_inputs(convolution, row, inputs);
    for (long i = 0; i < channels; i += SIMD_WIDTH) {
        vf sum = rounded(convolved(convolution, inputs, i, is_bf16, 0), is_bf16);
        store(s->out + row * bytes, i, channels, load(c, i, channels, is_bf16) * sum, is_bf16);
    }
}

#define SHORT_CONV(dtype, is_bf16)                                                                                    \
    NOINLINE void input_row_##dtype(const ShortConv *n, const RecurrentStep *s, long row) {                           \
        input_row(n, s, row, is_bf16);                                                                                \
    }                                                                                                                 \
    NOINLINE void output_row_##dtype(const Convolution *c, long row) { output_row(c, row, is_bf16); }                 \
    EXPORT(short_conv_##dtype)(const ShortConv *n, const RecurrentStep *s) {                                          \
        long rows = rows_of(s), bytes = n->channels * (is_bf16 ? 2 : 4);                                              \
        Convolution c = {(char *)s->scratch, bytes, bytes, n->tails, n->conv, n->taps, n->channels, s};               \
        _Pragma("omp parallel num_threads(s->threads) if (rows * n->channels >= 16384)") {                            \
            _Pragma("omp for") for (long row = 0; row < rows; row++) input_row_##dtype(n, s, row);                    \
            _Pragma("omp for nowait") for (long seq = 0; seq < s->seqs; seq++) keep_tail(&c, seq);                    \
            _Pragma("omp for") for (long row = 0; row < rows; row++) output_row_##dtype(&c, row);                     \
        }                                                                                                             \
    }

SHORT_CONV(f32, 0)
SHORT_CONV(bf16, 1)
