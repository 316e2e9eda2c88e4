/* Runs all layers of the decoder in one call, without returning to Python between them.
 *
 * It calls the same kernels in the same order as the loop in worker/models/decoder.py, so it computes the same bits.
 * The caller passes every kernel as a function pointer for the dtype and instruction set. All buffers are overwritten.
 * `x` holds the residual stream, and `h` its normed rows. `projected` holds the qkv projection, or the gate and up
 * projections. `q` holds the query heads. `inner` holds the output of attention, of a recurrent layer, or of the
 * activation.
 *
 * Several processes (ranks) may share a model (tensor parallelism). Each rank has some heads and some columns of every
 * linear, and receives the columns of the other ranks. */
#include "adapters.h"
#include "experts.h"
#include "ranks.h"
#include "recurrent.h"
#include <string.h>

typedef void Norm(const char *x, const void *w, char *out, long t, long heads, long n, long stride, float eps,
                     float offset, int threads);
typedef void AddNorm(const char *x, const char *residual, const void *w, char *out, char *sum, long t, long n,
                        float eps, float offset, float scale, int threads);
typedef void QkvRopeWrite(const char *qkv, char *q, char *cache_k, char *cache_v, const void *q_norm,
                          const void *k_norm, const void *v_norm, const float *k_centre, const float *cos,
                          const float *sin, const int64_t *positions,
                          const int64_t *slot_mapping, float eps, float offset, long t, long q_heads, long kv_heads,
                          long d, int normed, int kv_format, int threads);
typedef void OutputGate(const char *x, const char *gate, char *out, long t, long n, int threads);
typedef void Recur(const void *layer, const RecurrentStep *s);
typedef void ScaleRows(char *x, const float *scales, const int64_t *positions, long t, long n, int threads);
typedef int Attention(const char *q, const char *cache_k, const char *cache_v, const int32_t *query_start_loc,
                      const int32_t *seq_lens, const int32_t *page_table, const float *sinks,
                      const int32_t *bidirectional_end, char *out, long seqs, long q_stride, long heads, long kv_heads,
                      long d, long page_size, long page_table_stride, long window, int kv_format, float scale,
                      float softcap, int threads);

typedef struct {
    Norm *norm; /* RMS norm or layer norm */
    AddNorm *add_norm;
    Activate *activate;
    ActAndMul *act_and_mul;
    QkvRopeWrite *qkv_rope_write;
    Gemm *gemm;
    Attention *attention;
    Combine *combine;
    ScaleRows *scale_rows;
    OutputGate *output_gate;
} Kernels;

/* The sizes and further weights of a layer with latent attention (worker/models/latent.py). */
typedef struct {
    const Weight *q_b;             /* makes queries of the normed output of Layer.qkv; NULL: Layer.qkv makes queries */
    const Weight *absorb, *expand; /* arrays with a weight for each head */
    const void *q_a_norm, *kv_a_norm;
    long rank, rope, plain, value;
    float eps;
} Latent;

typedef struct {
    const void *before_attention, *after_attention, *before_mlp, *after_mlp; /* weights of the norms; may be NULL */
    const Weight *qkv, *gates, *o; /* gates: attention's output gates, DeltaNet's b and a, or Mamba-2's dt; NULL if the
                                      layer has no gates. With latent attention, qkv makes queries, or the numbers
                                      that they are made of, and gates makes the row to be cached */
    Recur *recur; /* the kernel of a recurrent layer; NULL if the layer has attention */
    const void *recurrent; /* the argument `layer` of `recur` */
    const Weight *gate_up, *down, *shared_gate; /* the linears of the MLP; in a layer with experts, of the shared
                                                   expert, or NULL */
    const float *activation;                    /* parameters of the activation; may be NULL */
    const Experts *experts;                     /* may be NULL */
    /* The weights of four norms in a layer that adds the output of an MLP to that of experts; NULL in all other
     * layers. */
    const void *after_dense, *before_router, *before_experts, *after_experts;
    const Weight *input_gate, *input_out; /* linears for the layer's vectors in Step.inputs (see add_input); may be
                                             NULL */
    const void *after_input;              /* the norm of input_out's output */
    const float *scale;                   /* the factor by which the layer's output is multiplied; may be NULL */
    /* The fields from here on are for attention. */
    const void *q_norm, *k_norm, *v_norm; /* may be NULL */
    const float *k_centre;          /* is subtracted from each token's keys [own_kv_heads][d]; may be NULL */
    const float *cos, *sin, *sinks; /* sinks may be NULL */
    char *cache_k, *cache_v;
    long window, group; /* group: the index of this cache's page tables and slots in the step */
    long kv_heads, own_kv_heads, d; /* own_kv_heads: heads that the layer writes; 0 if it reads another layer's cache */
    int normed, kv_format; /* normed: which elements q_norm and k_norm cover (the enum with HEADS in rope.c) */
    int bidirectional;        /* if true, Step.bidirectional_end applies to this layer */
    const Latent *latent;     /* NULL unless the layer has latent attention; then cache_k and cache_v are the same */
} Layer;

typedef struct {
    Kernels kernels;
    const Layer *layers;
    const void *last_norm;
    long num_layers, hidden_size, heads, page_size, element_size, input_size; /* input_size: see Step.inputs */
    float eps, offset, scale, softcap, residual_scale;
    const float *query_scales; /* the factor of the queries at each position; NULL: queries are not multiplied */
    int activation, parallel, is_bf16; /* parallel: if true, attention and feed-forward read the same normed rows */
    volatile uint64_t *layers_started; /* counts layers over all steps, to show that a long step makes progress */
    Ranks *ranks; /* NULL: this process has the whole model */
} Model;

typedef struct {
    char *x, *h, *projected, *gates, *q, *inner;
    char *gathered, *own_columns; /* gathered: `inner` of all ranks; own_columns: this rank's columns of a product. Only
                                     used with ranks */
    char *scratch;            /* for recurrent layers, latent attention and experts */
    char *inputs; /* [t][num_layers][input_size]: vectors that add_input adds to the rows; may be NULL */
#include "step_columns.h"
    const int32_t *const *page_tables; /* [groups of layers]: the page table of each group */
    const int32_t *bidirectional_end; /* [t] how many keys each row sees; NULL: a row sees the keys up to its own position */
    const float *cos, *sin;    /* rotary tables that replace the tables of all layers; NULL: the layers keep their own
                                  tables */
    const int64_t *rope_rows;  /* [t] the row of the rotary tables for each row; NULL: the row of its position */
    const int64_t *added_rows; /* [added_count] the rows of x to which the vectors `added` are added, ascending */
    const char *const *added;  /* [num_added]: vectors to add to added_rows of x after each of the first layers */
    long num_added, added_count;
    const char *first; /* [t][inputs]: the input of the first layer's projections; NULL: it is h */
    char *const *aux_hidden_states; /* [num_layers]: where each layer's output for the output rows is copied, or NULL; `aux_hidden_states` may
                            be NULL */
    long t, seqs, page_table_stride, num_outputs;
    long layers_of_all; /* how many layers compute all rows. The later layers compute only the output rows, and write no
                           K/V and no state */
    int threads;
    const StepAdapters *adapters; /* [2]: the adapters of all rows, and of the output rows; NULL if no row has an
                                     adapter */
} Step;

static int multiply(const Model *m, const Step *s, const GemmJob *jobs, long count) {
    if (!s->adapters) return m->kernels.gemm(jobs, count, m->is_bf16, s->threads);
    return multiply_with_adapters(s->adapters, m->kernels.gemm, jobs, count, m->is_bf16, s->threads);
}

static int linear(const Model *m, const Step *s, const char *x, const Weight *weights, char *out) {
    return multiply(m, s, &(GemmJob){weights, x, out, s->t}, 1);
}

static long ranks_of(const Model *m) {
    return m->ranks ? m->ranks->count : 1;
}

/* Multiplies `inner` by a weight. Each rank has some columns of `inner` and some columns of the weight, so `inner` is
 * gathered before the product, and the result after it. */
static int linear_of_inner(const Model *m, const Step *s, const Weight *weights, char *out) {
    if (!m->ranks) return linear(m, s, s->inner, weights, out);
    long own_inputs = weights->k / m->ranks->count * m->element_size;
    const char *inner = ranks_gathered(m->ranks, s->inner, s->gathered, s->t, own_inputs, s->threads);
    if (!inner || linear(m, s, inner, weights, s->own_columns)) return 1;
    return ranks_gather(m->ranks, s->own_columns, out, s->t, count_columns(weights) * m->element_size, s->threads);
}

static void norm(const Model *m, const Step *s, const char *x, const void *weight, char *out) {
    if (weight)
        m->kernels.norm(x, weight, out, s->t, 1, m->hidden_size, m->hidden_size, m->eps, m->offset, s->threads);
}

/* Sets x to x + residual_scale * h, and h to the norm of that sum, or to the sum if there is no norm. */
static void add_norm(const Model *m, const Step *s, char *h, const void *weight) {
    m->kernels.add_norm(h, s->x, weight, h, s->x, s->t, m->hidden_size, m->eps, m->offset, m->residual_scale,
                        s->threads);
}

/* Computes the projections of the layer's input: `projected`, and `gates` if the layer has gates. */
static int project(const Model *m, const Step *s, const Layer *l) {
    const char *rows = s->first && l == m->layers ? s->first : s->h;
    GemmJob jobs[] = {{l->qkv, rows, s->projected, s->t}, {l->gates, rows, s->gates, s->t}};
    return multiply(m, s, jobs, l->gates ? 2 : 1);
}

static int recurrent_block(const Model *m, const Step *s, const Layer *l) {
    if (project(m, s, l)) return 1;
    l->recur(l->recurrent, &(RecurrentStep){s->threads, s->seqs, s->projected, s->gates, s->read_slots, s->write_slots,
                                            s->query_start_loc, (float *)s->scratch, s->inner});
    return 0;
}

/* Writes the keys in qkv and, unless keys are the values, its values to the cache, and computes attention of its
 * queries into `inner`. */
static int attend(const Model *m, const Step *s, const Layer *l, const char *qkv) {
    m->kernels.qkv_rope_write(qkv, s->q, l->cache_k, l->latent ? NULL : l->cache_v, l->q_norm, l->k_norm, l->v_norm,
                              l->k_centre, s->cos ? s->cos : l->cos, s->sin ? s->sin : l->sin,
                              s->rope_rows ? s->rope_rows : s->positions, s->slot_mappings[l->group], m->eps, m->offset, s->t,
                              m->heads, l->own_kv_heads, l->d, l->normed, l->kv_format, s->threads);
    if (m->query_scales)
        m->kernels.scale_rows(s->q, m->query_scales, s->positions, s->t, m->heads * l->d, s->threads);
    return m->kernels.attention(s->q, l->cache_k, l->cache_v, s->query_start_loc, s->seq_lens, s->page_tables[l->group],
                                l->sinks, l->bidirectional ? s->bidirectional_end : NULL, s->inner, s->seqs, m->heads * l->d, m->heads,
                                l->kv_heads, l->d, m->page_size,
                                s->page_table_stride, l->window, l->kv_format, m->scale, m->softcap, s->threads);
}

static int attention_block(const Model *m, const Step *s, const Layer *l) {
    if (project(m, s, l) || attend(m, s, l, s->projected)) return 1;
    if (l->gates) m->kernels.output_gate(s->inner, s->gates, s->inner, s->t, m->heads * l->d, s->threads);
    return 0;
}

#define MIN_PARALLEL_COPIES 256 /* with fewer heads of rows, a second thread costs more time than it saves */

/* Copies `bytes` bytes for each head of each row. from: [t][heads], with from_row and from_head bytes from row to row
 * and from head to head; to: likewise. */
static void copy_heads(const Model *m, const Step *s, const char *from, long from_row, long from_head, char *to,
                       long to_row, long to_head, long bytes) {
#pragma omp parallel for num_threads(s->threads) if (s->t * m->heads >= MIN_PARALLEL_COPIES)
    for (long row = 0; row < s->t; row++)
        for (long head = 0; head < m->heads; head++)
            memcpy(to + row * to_row + head * to_head, from + row * from_row + head * from_head, bytes);
}

/* Multiplies the rows [heads][t][k] of each head by its weight. out: [heads][t][n] */
static int multiply_heads(const Model *m, const Step *s, const Weight *weights, const char *x, long k, long n, char *out) {
    GemmJob jobs[m->heads];
    for (long head = 0; head < m->heads; head++)
        jobs[head] = (GemmJob){&weights[head], x + head * s->t * k, out + head * s->t * n, s->t};
    return m->kernels.gemm(jobs, m->heads, m->is_bf16, s->threads);
}

/* Writes rows as they are cached: each half of a row is half of the rotated part, then half of c. c, rotated and `to`
 * are [t][heads], with the given bytes from row to row and from head to head. */
static void write_rows(const Step *s, const Latent *of, long size, long heads, const char *c, long c_row, long c_head,
                       const char *rotated, long rotated_row, long rotated_head, char *to, long to_row) {
    long pair = of->rope / 2 * size, half = of->rank / 2 * size, row_bytes = 2 * (pair + half);
#pragma omp parallel for num_threads(s->threads) if (s->t * heads >= MIN_PARALLEL_COPIES)
    for (long row = 0; row < s->t; row++)
        for (long head = 0; head < heads; head++)
            for (long i = 0; i < 2; i++) {
                char *out = to + row * to_row + head * row_bytes + i * (pair + half);
                memcpy(out, rotated + row * rotated_row + head * rotated_head + i * pair, pair);
                memcpy(out + pair, c + row * c_row + head * c_head + i * half, half);
            }
}

static long max_long(long a, long b) { return a > b ? a : b; }

/* Latent attention. For each row, the scratch memory has max(heads * max(plain, value), rank) elements, then heads *
 * rank, then (heads + 1) * row. */
static int latent_block(const Model *m, const Step *s, const Layer *l) {
    const Latent *of = l->latent;
    long size = m->element_size, t = s->t, heads = m->heads, row = l->d * size, query = (of->plain + of->rope) * size;
    long widest = max_long(heads * max_long(of->plain, of->value), of->rank);
    long plain = of->plain * size, rank = of->rank * size, value = of->value * size;
    char *narrow = s->scratch, *wide = narrow + t * widest * size, *qkv = wide + heads * t * rank;
    const char *queries = s->projected;
    if (project(m, s, l)) return 1;
    if (of->q_b) {
        long n = of->q_b->k;
        m->kernels.norm(s->projected, of->q_a_norm, s->projected, t, 1, n, n, of->eps, 0, s->threads);
        if (linear(m, s, s->projected, of->q_b, s->inner)) return 1;
        queries = s->inner;
    }
    copy_heads(m, s, queries, heads * query, query, narrow, plain, t * plain, plain);
    if (multiply_heads(m, s, of->absorb, narrow, plain, rank, wide)) return 1;
    write_rows(s, of, size, heads, wide, rank, t * rank, queries + plain, heads * query, query, qkv, (heads + 1) * row);
    m->kernels.norm(s->gates, of->kv_a_norm, narrow, t, 1, of->rank, l->d, of->eps, 0, s->threads);
    write_rows(s, of, size, 1, narrow, rank, 0, s->gates + rank, row, 0, qkv + heads * row, (heads + 1) * row);
    if (attend(m, s, l, qkv)) return 1;
    long pair = of->rope / 2 * size, half = rank / 2;
    for (long i = 0; i < 2; i++)
        copy_heads(m, s, s->inner + i * (pair + half) + pair, heads * row, row, wide + i * half, rank, t * rank, half);
    if (multiply_heads(m, s, of->expand, wide, rank, value, narrow)) return 1;
    copy_heads(m, s, narrow, value, t * value, s->inner, heads * value, value, value);
    return 0;
}

/* Runs attention or the recurrent layer, which mix each row with the rows before it. Writes the result to `inner`. */
static int mix(const Model *m, const Step *s, const Layer *l) {
    return l->recur ? recurrent_block(m, s, l) : l->latent ? latent_block(m, s, l) : attention_block(m, s, l);
}

static int mlp(const Model *m, const Step *s, const Layer *l, char *out) {
    if (linear(m, s, s->h, l->gate_up, s->projected)) return 1;
    long n = l->down->k / ranks_of(m);
    if (count_columns(l->gate_up) == n) /* an MLP without a gate projection */
        m->kernels.activate(s->projected, s->inner, l->activation, s->t, n, m->activation, s->threads);
    else
        m->kernels.act_and_mul(s->projected, s->projected + n * m->element_size, s->inner, s->t, n, 2 * n, 2 * n,
                               m->activation, s->threads);
    return linear_of_inner(m, s, l->down, out);
}

/* Replaces h by the output of the MLP, or by zeros if the layer has no feed-forward network. */
static int mlp_or_none(const Model *m, const Step *s, const Layer *l) {
    if (l->gate_up) return mlp(m, s, l, s->h);
    memset(s->h, 0, s->t * m->hidden_size * m->element_size);
    return 0;
}

/* Replaces h by the output of the layer's mixture of experts. Stores the output of the shared expert in `projected`,
 * and the logits of its gate in `q`. */
static int mixture(const Model *m, const Step *s, const Layer *l) {
    ExpertKernels kernels = {m->kernels.gemm, m->kernels.act_and_mul, m->kernels.activate, m->kernels.combine, m->is_bf16};
    if (l->gate_up && mlp(m, s, l, s->projected)) return 1;
    if (l->shared_gate && m->kernels.gemm(&(GemmJob){l->shared_gate, s->h, s->q, s->t}, 1, 0, s->threads)) return 1;
    return experts_forward(l->experts, &kernels, NULL, s->h, l->gate_up ? s->projected : NULL,
                           l->shared_gate ? (const float *)s->q : NULL, s->h, s->t, s->scratch, s->threads);
}

/* Replaces h by the normed output of the MLP plus the normed output of the experts. The inputs of the router and of the
 * experts are two different norms of x. */
static int mlp_beside_experts(const Model *m, const Step *s, const Layer *l) {
    ExpertKernels kernels = {m->kernels.gemm, m->kernels.act_and_mul, m->kernels.activate, m->kernels.combine, m->is_bf16};
    if (mlp(m, s, l, s->h)) return 1;
    norm(m, s, s->h, l->after_dense, s->h);
    norm(m, s, s->x, l->before_router, s->projected);
    norm(m, s, s->x, l->before_experts, s->inner);
    if (experts_forward(l->experts, &kernels, s->projected, s->inner, NULL, NULL, s->inner, s->t, s->scratch,
                        s->threads))
        return 1;
    norm(m, s, s->inner, l->after_experts, s->inner);
    m->kernels.add_norm(s->inner, s->h, NULL, s->inner, s->h, s->t, m->hidden_size, m->eps, m->offset, 1,
                            s->threads);
    return 0;
}

/* Gates the layer's vectors in Step.inputs with x, projects them, adds the result to x, and sets h to the sum. */
static int add_input(const Model *m, const Step *s, const Layer *l) {
    long n = m->input_size;
    const char *inputs = s->inputs + (l - m->layers) * n * m->element_size;
    if (linear(m, s, s->x, l->input_gate, s->projected)) return 1;
    m->kernels.act_and_mul(s->projected, inputs, s->inner, s->t, n, n, m->num_layers * n, m->activation, s->threads);
    if (linear(m, s, s->inner, l->input_out, s->h)) return 1;
    norm(m, s, s->h, l->after_input, s->h);
    add_norm(m, s, s->h, NULL);
    return 0;
}

static int feed_forward_block(const Model *m, const Step *s, const Layer *l, const void *next_norm) {
    char *mixed = m->parallel ? s->projected : s->h; /* with `parallel`, h is still needed */
    if (linear_of_inner(m, s, l->o, mixed)) return 1;
    norm(m, s, mixed, l->after_attention, mixed);
    add_norm(m, s, mixed, l->before_mlp);
    if (l->after_experts ? mlp_beside_experts(m, s, l) : l->experts ? mixture(m, s, l) : mlp_or_none(m, s, l)) return 1;
    norm(m, s, s->h, l->after_mlp, s->h);
    if (!l->input_gate && !l->scale) {
        add_norm(m, s, s->h, next_norm);
        return 0;
    }
    add_norm(m, s, s->h, NULL);
    if (l->input_gate && add_input(m, s, l)) return 1;
    if (l->scale) m->kernels.scale_rows(s->x, l->scale, NULL, s->t, m->hidden_size, s->threads);
    if (next_norm)
        norm(m, s, s->x, next_norm, s->h);
    else
        memcpy(s->h, s->x, s->t * m->hidden_size * m->element_size);
    return 0;
}

/* Moves the output rows to the front. Their indices ascend, so no row is overwritten before it has been moved. */
static void move_rows_to_front(char *data, const Step *s, size_t bytes) {
    for (long i = 0; i < s->num_outputs; i++)
        if (s->logits_indices[i] != i) memcpy(data + i * bytes, data + s->logits_indices[i] * bytes, bytes);
}

/* Drops all rows except the output rows. It is called in the middle of a layer, when `inner` has been computed. */
static void drop_other_rows(const Model *m, Step *s, const Layer *l) {
    move_rows_to_front(s->inner, s, l->o->k / ranks_of(m) * m->element_size);
    move_rows_to_front(s->x, s, m->hidden_size * m->element_size);
    if (m->parallel) move_rows_to_front(s->h, s, m->hidden_size * m->element_size);
    if (s->inputs) move_rows_to_front(s->inputs, s, m->num_layers * m->input_size * m->element_size);
    s->t = s->num_outputs;
    if (s->adapters) s->adapters++;
}

/* Adds vectors to the rows of x that added_rows names, and recomputes the norm of these rows. */
static void add_vectors(const Model *m, const Step *s, const char *vectors, const void *weight) {
    long bytes = m->hidden_size * m->element_size;
    for (long i = 0, rows; i < s->added_count; i += rows) {
        long row = s->added_rows[i];
        for (rows = 1; i + rows < s->added_count && s->added_rows[i + rows] == row + rows;) rows++;
        char *x = s->x + row * bytes;
        m->kernels.add_norm(vectors + i * bytes, x, weight, s->h + row * bytes, x, rows, m->hidden_size, m->eps,
                            m->offset, 1.0f, s->threads);
    }
}

/* Copies rows of x, which are the outputs of a layer. indices: the rows to copy; NULL: all rows of the step. */
static void copy_outputs(const Model *m, const Step *s, char *out, const int64_t *indices) {
    size_t bytes = m->hidden_size * m->element_size;
    if (!indices) memcpy(out, s->x, s->t * bytes);
    for (long i = 0; indices && i < s->num_outputs; i++) memcpy(out + i * bytes, s->x + indices[i] * bytes, bytes);
}

/* Runs all layers. x holds the embedded tokens. Afterwards the first `num_outputs` rows of h are the normed output.
 * outputs: a step with only the output rows, for the layers that compute only these rows; NULL: all layers compute all
 * rows.
 * Returns 0, or 1 when memory is exhausted or a rank is gone; some layers have then written K/V and states. */
__attribute__((visibility("default"))) int decoder_forward(const Model *m, const Step *args, const Step *outputs) {
    Step step = *args;
    const Step *s = &step;
    if (m->layers[0].before_attention)
        norm(m, s, s->x, m->layers[0].before_attention, s->h);
    else
        memcpy(s->h, s->x, s->t * m->hidden_size * m->element_size);
    for (long i = 0; i < m->num_layers; i++) {
        const Layer *l = &m->layers[i];
        ++*m->layers_started;
        if (mix(m, s, l)) return 1;
        if (i + 1 == args->layers_of_all) { /* only the output rows are needed from here on */
            drop_other_rows(m, &step, l);
            if (!s->t) return 0;
            if (outputs) s = outputs;
        }
        const void *next = i + 1 < m->num_layers ? l[1].before_attention : m->last_norm;
        if (feed_forward_block(m, s, l, next)) return 1;
        if (i < s->num_added) add_vectors(m, s, s->added[i], next);
        if (args->aux_hidden_states && args->aux_hidden_states[i])
            copy_outputs(m, s, args->aux_hidden_states[i], i + 1 < args->layers_of_all ? args->logits_indices : NULL);
    }
    return 0;
}
