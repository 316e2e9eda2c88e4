/* The short convolution of LFM2. worker/kernels/short_conv.py says what is computed. */
#include "convolution.h"
#include "short_conv.h"

/* Computes the inputs b * x of a row. */
INLINE void input_row(const ShortConv *n, long row, int is_bf16) {
    long bytes = n->channels * (is_bf16 ? 2 : 4);
    const char *b = n->projected + row * 3 * bytes, *x = b + 2 * bytes;
    for (long i = 0; i < n->channels; i += SIMD_WIDTH)
        store(n->inputs + row * bytes, i, n->channels,
              load(b, i, n->channels, is_bf16) * load(x, i, n->channels, is_bf16), is_bf16);
}

INLINE void output_row(const ShortConv *n, const Convolution *convolution, long row, int is_bf16) {
    long bytes = n->channels * (is_bf16 ? 2 : 4);
    const char *inputs[MAX_TAPS], *c = n->projected + (row * 3 + 1) * bytes;
    find_inputs(convolution, row, inputs);
    for (long i = 0; i < n->channels; i += SIMD_WIDTH) {
        vf sum = rounded(convolved(convolution, inputs, i, is_bf16), is_bf16);
        store(n->out + row * bytes, i, n->channels, load(c, i, n->channels, is_bf16) * sum, is_bf16);
    }
}

#define SHORT_CONV(dtype, is_bf16)                                                                                    \
    NOINLINE void input_row_##dtype(const ShortConv *n, long row) { input_row(n, row, is_bf16); }                     \
    NOINLINE void output_row_##dtype(const ShortConv *n, const Convolution *c, long row) {                            \
        output_row(n, c, row, is_bf16);                                                                               \
    }                                                                                                                 \
    EXPORT(short_conv_##dtype)(const ShortConv *n) {                                                                  \
        long rows = n->query_start_loc[n->seqs], bytes = n->channels * (is_bf16 ? 2 : 4);                             \
        Convolution c = {n->inputs, bytes, bytes, n->tails, n->conv, n->taps, n->channels, n->seqs,                   \
                         n->read_slots, n->write_slots, n->query_start_loc};                                          \
        _Pragma("omp parallel num_threads(n->threads) if (rows * n->channels >= 16384)") {                            \
            _Pragma("omp for") for (long row = 0; row < rows; row++) input_row_##dtype(n, row);                       \
            _Pragma("omp for nowait") for (long seq = 0; seq < n->seqs; seq++) keep_tail(&c, seq);                    \
            _Pragma("omp for") for (long row = 0; row < rows; row++) output_row_##dtype(n, &c, row);                  \
        }                                                                                                             \
    }

SHORT_CONV(f32, 0)
SHORT_CONV(bf16, 1)
