/* Attention among all tokens of a text, in both directions, without a K/V cache. Texts lie one after another in the rows
 * of a matrix. Everything is computed in fp32.
 *
 * A score is one chain of multiply-adds over the elements of a head, and an output is one chain over the keys that the
 * token sees. So the bits of a token depend on its own text only, not on other texts or on the number of threads. */
#include "rows.h"
#include <stdlib.h>

#if SIMD_WIDTH == 16
#define BLOCK_ROWS 8 /* tokens that are computed together: their sums fill the registers */
#else
#define BLOCK_ROWS 4
#endif
#define PAIR (2 * SIMD_WIDTH)

typedef struct {
    const char *q, *k, *v;
    char *out;
    const int32_t *starts; /* [texts + 1]: the first row of each text, then the number of rows */
    long texts, heads, kv_heads, d, reach;
    long q_stride, k_stride, v_stride; /* elements from row to row */
    float scale;
} TextArgs;

/* The memory of a thread. keys: [d][n], transposed; values: [n][d]; q, out: [BLOCK_ROWS][d]; weights: [BLOCK_ROWS][n].
 * n is the length of the longest text. Rows are padded to whole registers. */
typedef struct {
    float *keys, *values, *q, *out, *weights;
} TextScratch;

INLINE long padded(long n) { return (n + PAIR - 1) / PAIR * PAIR; }
INLINE float number(const char *row, long i, int is_bf16) {
    return is_bf16 ? bf16_to_float(((const bf16 *)row)[i]) : ((const float *)row)[i];
}

INLINE void widen_row(const char *from, float *to, long d, int is_bf16) {
    for (long i = 0; i < padded(d); i += SIMD_WIDTH)
        store_f32(to + i, i < d ? load(from, i, d, is_bf16) : broadcast(0));
}

/* Copies the keys and values of one head of a text. */
INLINE void gather_text(const TextArgs *a, TextScratch *s, long first, long n, long kv_head, int is_bf16) {
    long width = padded(n), dw = padded(a->d);
    size_t size = element_size(is_bf16);
    for (long j = 0; j < n; j++) {
        const char *key = a->k + ((first + j) * a->k_stride + kv_head * a->d) * size;
        for (long i = 0; i < a->d; i++) s->keys[i * width + j] = number(key, i, is_bf16);
        widen_row(a->v + ((first + j) * a->v_stride + kv_head * a->d) * size, s->values + j * dw, a->d, is_bf16);
    }
    for (long i = 0; i < a->d; i++)
        for (long j = n; j < width; j++) s->keys[i * width + j] = 0;
}

/* Computes scores of `rows` tokens with the keys of [from, to), where both are multiples of PAIR. */
INLINE void score_rows(const TextScratch *s, const int rows, long d, long width, long from, long to) {
    long dw = padded(d);
    for (long j = from; j < to; j += PAIR) {
        vf sums[BLOCK_ROWS][2];
        for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = broadcast(0);
        for (long i = 0; i < d; i++) {
            vf low = load_f32(s->keys + i * width + j), high = load_f32(s->keys + i * width + j + SIMD_WIDTH);
            for (int r = 0; r < rows; r++) {
                vf q = broadcast(s->q[r * dw + i]);
                sums[r][0] = simd_fma(q, low, sums[r][0]);
                sums[r][1] = simd_fma(q, high, sums[r][1]);
            }
        }
        for (int r = 0; r < rows; r++) {
            store_f32(s->weights + r * width + j, sums[r][0]);
            store_f32(s->weights + r * width + j + SIMD_WIDTH, sums[r][1]);
        }
    }
}

/* Turns the scores [from, to) of a token into weights, not yet divided by their sum, which is returned. It sees the keys
 * [first, end); other weights become zero. */
INLINE float soften(float *weights, long from, long to, long first, long end, float scale) {
    vi lane = {0};
    for (int i = 0; i < SIMD_WIDTH; i++) lane[i] = i;
    vf top = broadcast(-3.0e38f), sum = broadcast(0);
    for (long j = from; j < to; j += SIMD_WIDTH) {
        vi key = lane + (int32_t)j;
        vi seen = (key >= (int32_t)first) & (key < (int32_t)end);
        top = simd_max(top, simd_select(seen, load_f32(weights + j), broadcast(-3.0e38f)));
    }
    vf most = broadcast(simd_reduce_max(top) * scale);
    for (long j = from; j < to; j += SIMD_WIDTH) {
        vi key = lane + (int32_t)j;
        vi seen = (key >= (int32_t)first) & (key < (int32_t)end);
        vf p = simd_exp(simd_fma(load_f32(weights + j), broadcast(scale), -most));
        p = simd_select(seen, p, broadcast(0));
        sum += p;
        store_f32(weights + j, p);
    }
    return simd_sum(sum);
}

/* Adds up the values of the keys [first, end), times the weights. */
INLINE void mix_rows(const TextScratch *s, const int rows, long d, long width, long first, long end) {
    long dw = padded(d);
    for (long i = 0; i < dw; i += PAIR) {
        vf sums[BLOCK_ROWS][2];
        for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = broadcast(0);
        for (long j = first; j < end; j++) {
            vf low = load_f32(s->values + j * dw + i), high = load_f32(s->values + j * dw + i + SIMD_WIDTH);
            for (int r = 0; r < rows; r++) {
                vf p = broadcast(s->weights[r * width + j]);
                sums[r][0] = simd_fma(p, low, sums[r][0]);
                sums[r][1] = simd_fma(p, high, sums[r][1]);
            }
        }
        for (int r = 0; r < rows; r++) {
            store_f32(s->out + r * dw + i, sums[r][0]);
            store_f32(s->out + r * dw + i + SIMD_WIDTH, sums[r][1]);
        }
    }
}

/* Computes the tokens [row, row + rows) of a text of n tokens. The keys that a block computes are aligned, and the
 * weights of keys that a token does not see are zero, so its neighbours in the block do not matter. */
INLINE void attend_rows(const TextArgs *a, TextScratch *s, long start, long n, long head, long row, long rows,
                        int is_bf16) {
    long width = padded(n), dw = padded(a->d);
    long first = a->reach && row > a->reach ? row - a->reach : 0;
    long end = a->reach && row + rows + a->reach < n ? row + rows + a->reach : n;
    long from = first / PAIR * PAIR, to = padded(end);
    size_t size = element_size(is_bf16);
    for (long r = 0; r < BLOCK_ROWS; r++) /* beyond the last token, the last one is computed again */
        widen_row(a->q + ((start + row + (r < rows ? r : rows - 1)) * a->q_stride + head * a->d) * size, s->q + r * dw,
                  a->d, is_bf16);
    score_rows(s, BLOCK_ROWS, a->d, width, from, to);
    float sums[BLOCK_ROWS];
    for (long r = 0; r < BLOCK_ROWS; r++) {
        long own = row + (r < rows ? r : rows - 1);
        long low = a->reach && own > a->reach ? own - a->reach : 0;
        long high = a->reach && own + a->reach + 1 < n ? own + a->reach + 1 : n;
        sums[r] = soften(s->weights + r * width, from, to, low, high, a->scale);
    }
    mix_rows(s, BLOCK_ROWS, a->d, width, first, end);
    for (long r = 0; r < rows; r++) {
        char *out = a->out + ((start + row + r) * a->heads + head) * a->d * size;
        for (long i = 0; i < a->d; i += SIMD_WIDTH)
            store(out, i, a->d, load_f32(s->out + r * dw + i) / sums[r], is_bf16);
    }
}

static int make_scratch(TextScratch *s, long longest, long d) {
    long width = padded(longest), dw = padded(d);
    size_t counts[] = {d * width, longest * dw, BLOCK_ROWS * dw, BLOCK_ROWS * dw, BLOCK_ROWS * width}, total = 0;
    for (int i = 0; i < 5; i++) total += counts[i];
    float *memory = aligned_alloc(64, (total * 4 + 63) / 64 * 64);
    if (!memory) return 0;
    float **parts[] = {&s->keys, &s->values, &s->q, &s->out, &s->weights};
    for (int i = 0; i < 5; memory += counts[i], i++) *parts[i] = memory;
    return 1;
}

/* Computes the texts. A unit of work is one head of one text. Returns 1 if there is no memory for the scratch. */
static int attend_texts(const TextArgs *a, int threads, const int is_bf16) {
    long longest = 0;
    int failed = 0;
    for (long i = 0; i < a->texts; i++)
        if (a->starts[i + 1] - a->starts[i] > longest) longest = a->starts[i + 1] - a->starts[i];
#pragma omp parallel num_threads(threads)
    {
        TextScratch s;
        int made = make_scratch(&s, longest, a->d);
        if (!made) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        if (!failed) { /* no thread changes it any more */
            flush_denormals(1);
#pragma omp for schedule(dynamic)
            for (long unit = 0; unit < a->texts * a->heads; unit++) {
                long text = unit / a->heads, head = unit % a->heads;
                long start = a->starts[text], n = a->starts[text + 1] - start;
                gather_text(a, &s, start, n, head / (a->heads / a->kv_heads), is_bf16);
                for (long row = 0; row < n; row += BLOCK_ROWS)
                    attend_rows(a, &s, start, n, head, row, n - row < BLOCK_ROWS ? n - row : BLOCK_ROWS, is_bf16);
            }
            flush_denormals(0);
        }
        if (made) free(s.keys);
    }
    return failed;
}

#define TEXT_ATTENTION(dtype, is_bf16)                                                                                \
    __attribute__((visibility("default"))) int JOIN(text_attention_##dtype, SUFFIX)(                                  \
        const char *q, const char *k, const char *v, const int32_t *starts, char *out, long texts, long heads,        \
        long kv_heads, long d, long reach, long q_stride, long k_stride, long v_stride, float scale, int threads) {   \
        TextArgs a = {q, k, v, out, starts, texts, heads, kv_heads, d, reach, q_stride, k_stride, v_stride, scale};   \
        return attend_texts(&a, threads, is_bf16);                                                                    \
    }

TEXT_ATTENTION(f32, 0)
TEXT_ATTENTION(bf16, 1)
