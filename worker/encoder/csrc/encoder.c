/* Runs all layers of an encoder in one call, without returning to Python between them.
 *
 * It calls the same kernels in the same order as the loop in worker/encoder/encoder.py, so it computes the same bits. The
 * caller passes every kernel as a function pointer for the dtype and instruction set. */
#include "experts.h"
#include <string.h>

typedef void Norm(const char *x, const void *w, char *out, long t, long heads, long n, long stride, float eps,
                  float offset, int threads);
typedef void AddNorm(const char *x, const char *residual, const void *w, char *out, char *sum, long t, long n,
                     float eps, float offset, float scale, int threads);
typedef void Rotary(const char *x, char *out, const float *cos, const float *sin, const int64_t *positions, long t,
                    long heads, long d, long stride, int threads);
typedef int TextAttention(const char *q, const char *k, const char *v, const int32_t *starts, char *out, long texts,
                          long heads, long kv_heads, long d, long reach, long q_stride, long k_stride, long v_stride,
                          float scale, int threads);

typedef struct {
    Norm *norm, *head_norm; /* norm: RMS norm or layer norm */
    AddNorm *add_norm;
    Activate *activate;
    ActAndMul *act_and_mul;
    Gemm *gemm;
    Rotary *rotary;
    TextAttention *text_attention;
} EncoderKernels;

typedef struct {
    const Weight *qkv, *o, *gate_up, *down;
    const void *q_norm, *k_norm; /* may be NULL */
    /* Weights of norms, which may be NULL: of what attention and the MLP return, and of the sums with the residual */
    const void *after_attention, *after_first_sum, *after_mlp, *after_second_sum;
    const float *activation; /* parameters of the activation; may be NULL */
    const float *cos, *sin;  /* NULL: the layer has no rotary embedding */
    long kv_heads, d, reach; /* reach: see text_attention.c */
    int whole;               /* if true, q_norm and k_norm cover all heads together */
} EncoderLayer;

typedef struct {
    EncoderKernels kernels;
    const EncoderLayer *layers;
    const void *first_norm; /* the norm before the first layer; may be NULL */
    long num_layers, hidden_size, heads, element_size;
    float eps, offset, scale, residual_scale;
    int activation, gated, is_bf16;
    int norms_after_sums; /* if true, a normed sum is also the next residual; if not, the sum itself is */
    volatile uint64_t *layers_started; /* counts layers over all steps, to show that a long step makes progress */
} EncoderModel;

/* t: rows; x: the residual stream, which holds the embedded tokens at first; h: rows that linears read or have written */
typedef struct {
    char *x, *h, *projected, *q, *k, *inner;
    const int64_t *places; /* [t] the place of each token in its text */
    const int32_t *starts; /* [texts + 1] the first row of each text, then t */
    long t, texts;
    int threads;
} EncoderStep;

/* Returns the input of a layer's linears. */
static char *rows_of(const EncoderModel *m, const EncoderStep *s) {
    return m->norms_after_sums ? s->x : s->h;
}

static int multiply(const EncoderModel *m, const EncoderStep *s, const char *x, const Weight *weight, char *out) {
    return m->kernels.gemm(&(GemmJob){weight, x, out, s->t}, 1, m->is_bf16, s->threads);
}

/* Heads of all rows: `stride` elements lie from row to row. */
typedef struct {
    const char *rows;
    long stride;
} Heads;

/* Applies the norm and the rotary embedding of a layer, if it has them. Returns the result, which may be `from`. */
static Heads prepared(const EncoderModel *m, const EncoderStep *s, const EncoderLayer *l, Heads from, long heads,
                      const void *norm, char *to) {
    if (norm) {
        long units = l->whole ? 1 : heads, n = l->whole ? heads * l->d : l->d;
        m->kernels.head_norm(from.rows, norm, to, s->t, units, n, from.stride, m->eps, m->offset, s->threads);
        from = (Heads){to, heads * l->d};
    }
    if (l->cos) {
        m->kernels.rotary(from.rows, to, l->cos, l->sin, s->places, s->t, heads, l->d, from.stride, s->threads);
        from = (Heads){to, heads * l->d};
    }
    return from;
}

/* Sets h to the product of `inner` and a weight, and adds it to the residual stream, with the norms around the sum. */
static int add_product(const EncoderModel *m, const EncoderStep *s, const Weight *weight, const void *before_sum,
                       const void *after_sum) {
    if (multiply(m, s, s->inner, weight, s->h)) return 1;
    if (before_sum)
        m->kernels.norm(s->h, before_sum, s->h, s->t, 1, m->hidden_size, m->hidden_size, m->eps, m->offset, s->threads);
    char *sum = m->norms_after_sums ? s->h : s->x;
    m->kernels.add_norm(s->h, s->x, after_sum, rows_of(m, s), sum, s->t, m->hidden_size, m->eps, m->offset,
                        m->residual_scale, s->threads);
    return 0;
}

static int attend(const EncoderModel *m, const EncoderStep *s, const EncoderLayer *l) {
    if (multiply(m, s, rows_of(m, s), l->qkv, s->projected)) return 1;
    long width = (m->heads + 2 * l->kv_heads) * l->d, head = l->d * m->element_size;
    const char *keys = s->projected + m->heads * head;
    Heads q = prepared(m, s, l, (Heads){s->projected, width}, m->heads, l->q_norm, s->q);
    Heads k = prepared(m, s, l, (Heads){keys, width}, l->kv_heads, l->k_norm, s->k);
    return m->kernels.text_attention(q.rows, k.rows, keys + l->kv_heads * head, s->starts, s->inner, s->texts, m->heads,
                                     l->kv_heads, l->d, l->reach, q.stride, k.stride, width, m->scale, s->threads);
}

static int feed_forward(const EncoderModel *m, const EncoderStep *s, const EncoderLayer *l) {
    if (multiply(m, s, rows_of(m, s), l->gate_up, s->projected)) return 1;
    long n = l->down->k;
    if (m->gated)
        m->kernels.act_and_mul(s->projected, s->projected + n * m->element_size, s->inner, s->t, n, 2 * n, 2 * n,
                               m->activation, s->threads);
    else
        m->kernels.activate(s->projected, s->inner, l->activation, s->t, n, m->activation, s->threads);
    return 0;
}

/* Runs all layers. Afterwards the normed output is in x if norms follow sums, else in h. Returns 0, or 1 when memory is
 * exhausted. */
__attribute__((visibility("default"))) int encoder_forward(const EncoderModel *m, const EncoderStep *s) {
    if (m->first_norm)
        m->kernels.norm(s->x, m->first_norm, s->h, s->t, 1, m->hidden_size, m->hidden_size, m->eps, m->offset,
                        s->threads);
    else if (!m->norms_after_sums)
        memcpy(s->h, s->x, s->t * m->hidden_size * m->element_size);
    for (const EncoderLayer *l = m->layers; l < m->layers + m->num_layers; l++) {
        ++*m->layers_started;
        if (attend(m, s, l) || add_product(m, s, l->o, l->after_attention, l->after_first_sum)) return 1;
        if (feed_forward(m, s, l) || add_product(m, s, l->down, l->after_mlp, l->after_second_sum)) return 1;
    }
    return 0;
}
