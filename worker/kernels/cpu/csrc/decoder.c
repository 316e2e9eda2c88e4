/* A forward through all layers in one call: what the decoder's loop does, without returning to Python in between.
 *
 * Calls the kernels in order and computes nothing itself, so the bits are the loop's. Each kernel comes as a function
 * for its dtype and instruction set. All buffers are overwritten: x and h are the step's residual and hidden rows,
 * `wide` holds the fused projections, `q` and `mixed` the heads before and after attention. */
#include <stdint.h>
#include <string.h>

typedef void RmsNorm(const char *x, const void *w, char *out, long t, long heads, long n, long stride, float eps,
                  float offset, int threads);
typedef void AddRmsNorm(const char *x, const char *residual, const void *w, char *out, char *sum, long t, long n, float eps,
                     float offset, int threads);
typedef void ActAndMul(const char *x, char *out, long t, long n, int gelu, int threads);
typedef void QkvRopeWrite(const char *qkv, char *q, char *cache_k, char *cache_v, const void *q_norm, const void *k_norm,
                   const float *cos, const float *sin, const int64_t *positions, const int64_t *slot_mapping,
                   float eps, float offset, long t, long q_heads, long kv_heads, long d, int paired, int threads);
typedef int Gemm(const char *x, const char *weight, const float *bias, char *out, long t, long n, long k, int out_bf16,
                 int threads);
typedef int Attention(const char *q, const char *cache_k, const char *cache_v, const int32_t *query_start_loc,
                   const int32_t *seq_lens, const int32_t *page_table, char *out, long seqs, long q_stride, long heads,
                   long kv_heads, long d, long page_size, long page_stride, long window, float scale, int threads);

typedef struct {
    RmsNorm *rms_norm;
    AddRmsNorm *add_rms_norm;
    ActAndMul *act_and_mul;
    QkvRopeWrite *qkv_rope_write;
    Gemm *gemm;
    Attention *attention;
} Kernels;

typedef struct {
    const void *before_attention, *q_norm, *k_norm, *after_attention, *before_mlp, *after_mlp; /* NULL: none */
    const char *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
    const float *cos, *sin;
    char *cache_k, *cache_v;
    long window;
} Layer;

typedef struct {
    Kernels kernels;
    const Layer *layers;
    const void *last_norm;
    long count, hidden, inner, heads, kv_heads, d, page_size, element;
    float eps, offset, scale;
    int gelu, is_bf16, paired;
    volatile uint64_t *done; /* layers begun so far, in all steps: shows that a long step makes progress */
} Model;

typedef struct {
    char *x, *h, *wide, *q, *mixed;
    const int64_t *positions, *slot_mapping, *logits_indices; /* logits_indices: ascending */
    const int32_t *query_start_loc, *seq_lens, *page_table;
    long t, seqs, page_stride, wanted;
    int threads;
} Step;

static int linear(const Model *m, const Step *s, const char *x, const char *weight, const float *bias, char *out, long n,
                   long k) {
    return m->kernels.gemm(x, weight, bias, out, s->t, n, k, m->is_bf16, s->threads);
}

static void norm_rows(const Model *m, const Step *s, const char *x, const void *weight, char *out) {
    if (weight) m->kernels.rms_norm(x, weight, out, s->t, 1, m->hidden, m->hidden, m->eps, m->offset, s->threads);
}

/* h becomes the norm of x + h, x the sum. */
static void add_norm(const Model *m, const Step *s, const void *weight) {
    m->kernels.add_rms_norm(s->h, s->x, weight, s->h, s->x, s->t, m->hidden, m->eps, m->offset, s->threads);
}

static int attention_block(const Model *m, const Step *s, const Layer *l) {
    long size = (m->heads + 2 * m->kv_heads) * m->d;
    if (linear(m, s, s->h, l->qkv, l->qkv_bias, s->wide, size, m->hidden)) return 1;
    m->kernels.qkv_rope_write(s->wide, s->q, l->cache_k, l->cache_v, l->q_norm, l->k_norm, l->cos, l->sin, s->positions,
                     s->slot_mapping, m->eps, m->offset, s->t, m->heads, m->kv_heads, m->d, m->paired, s->threads);
    return m->kernels.attention(s->q, l->cache_k, l->cache_v, s->query_start_loc, s->seq_lens, s->page_table, s->mixed,
                             s->seqs, m->heads * m->d, m->heads, m->kv_heads, m->d, m->page_size, s->page_stride,
                             l->window, m->scale, s->threads);
}

static int mlp_block(const Model *m, const Step *s, const Layer *l, const void *next_norm) {
    if (linear(m, s, s->mixed, l->o, l->o_bias, s->h, m->hidden, m->heads * m->d)) return 1;
    norm_rows(m, s, s->h, l->after_attention, s->h);
    add_norm(m, s, l->before_mlp);
    if (linear(m, s, s->h, l->gate_up, l->gate_up_bias, s->wide, 2 * m->inner, m->hidden)) return 1;
    m->kernels.act_and_mul(s->wide, s->mixed, s->t, m->inner, m->gelu, s->threads);
    if (linear(m, s, s->mixed, l->down, l->down_bias, s->h, m->hidden, m->inner)) return 1;
    norm_rows(m, s, s->h, l->after_mlp, s->h);
    add_norm(m, s, next_norm);
    return 0;
}

/* The wanted rows move to the front; ascending, so none is overwritten before it has moved. */
static void keep_rows(char *data, const Step *s, size_t bytes) {
    for (long i = 0; i < s->wanted; i++)
        if (s->logits_indices[i] != i) memcpy(data + i * bytes, data + s->logits_indices[i] * bytes, bytes);
}

/* x holds the embedded tokens; afterwards the first `wanted` rows of h are the normed output. Returns 0, or 1 when
 * memory could not be had: then K/V of some layers are written, and nothing else has changed. */
__attribute__((visibility("default"))) int decoder_forward(const Model *m, const Step *given) {
    Step step = *given, *s = &step;
    norm_rows(m, s, s->x, m->layers[0].before_attention, s->h);
    for (long i = 0; i < m->count; i++) {
        const Layer *l = &m->layers[i];
        ++*m->done;
        if (attention_block(m, s, l)) return 1;
        if (i + 1 == m->count) { /* K/V are written: from here on only the rows that are asked for matter */
            keep_rows(s->mixed, s, m->heads * m->d * m->element);
            keep_rows(s->x, s, m->hidden * m->element);
            s->t = s->wanted;
        }
        if (s->t && mlp_block(m, s, l, i + 1 < m->count ? l[1].before_attention : m->last_norm)) return 1;
    }
    return 0;
}
