/* The feed-forward network of a mixture of experts: the router chooses experts for each row, and the row's result is
 * the weighted sum of their outputs.
 *
 * A slot is one (row, chosen expert) pair. The slots of all rows are sorted by expert, so an expert's weights are read
 * once for all rows that chose it, and not at all if no row did. All experts' products run in one parallel region.
 * A row's result does not depend on other rows: its products do not, and its slots are summed in a fixed order. */
#include "experts.h"
#include "model_limits.h"
#include <math.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN_PARALLEL_ROWS 32 /* with fewer rows, a second thread costs more time than it saves */

/* The state of one call. Slots are numbered [t][chosen]. A place is the position of a slot after sorting by expert. */
typedef struct {
    const Experts *e;
    const ExpertKernels *kernels;
    const char *h;
    long t, slots, hidden, inner, size; /* inner: this rank's share of the experts' width I; size: bytes per element */
    long own;                           /* this rank's share of the result's columns */
    int threads;
    float *logits, *weights;          /* logits: [t, count], of the router; weights: [slots], the routing weights */
    int32_t *numbers, *places, *rows; /* numbers: the expert of each slot; places: the place of each slot; rows: the row
                                         of each place */
    int64_t *ends;                    /* [count]: for each expert, the end of its places */
    GemmJob *jobs;                    /* [count] */
    char *narrow, *wide;              /* narrow: [slots, max(H, inner)] elements; wide: for each slot, the larger of 2 *
                                         inner elements and H floats */
    char *gathered, *mixed, *added;   /* only with ranks; in elements: gathered [slots, I], mixed and added [t, own] */
} Call;

static long max_long(long a, long b) { return a > b ? a : b; }

/* Takes `bytes` bytes (rounded up to cache lines) of scratch memory from *end on, and advances *end past them. */
static void *carve(char **end, long bytes) {
    char *begin = *end;
    *end += (bytes + 63) / 64 * 64;
    return begin;
}

static Call call_in(const Experts *e, int is_bf16, long t, char *scratch, char **end) {
    long ranks = e->ranks ? e->ranks->count : 1;
    Call c = {.e = e, .t = t, .slots = t * e->chosen, .hidden = e->router->k, .inner = e->down->k / ranks};
    c.own = c.hidden / ranks;
    c.size = is_bf16 ? 2 : 4;
    *end = scratch;
    c.logits = carve(end, t * e->count * 4);
    c.weights = carve(end, c.slots * 4);
    c.numbers = carve(end, c.slots * 4);
    c.places = carve(end, c.slots * 4);
    c.rows = carve(end, c.slots * 4);
    c.ends = carve(end, e->count * 8);
    c.jobs = carve(end, e->count * sizeof(GemmJob));
    c.narrow = carve(end, c.slots * max_long(c.hidden, c.inner) * c.size);
    c.wide = carve(end, c.slots * max_long(2 * c.inner * c.size, c.hidden * 4));
    c.gathered = carve(end, e->ranks ? c.slots * e->down->k * c.size : 0);
    c.mixed = carve(end, e->ranks ? t * c.own * c.size : 0);
    c.added = carve(end, e->ranks ? t * c.own * c.size : 0);
    return c;
}

EXPORT long experts_scratch(const Experts *e, int is_bf16, long t) {
    char *end, *begin = (char *)64; /* not a real address: only the distance from begin to end is used */
    call_in(e, is_bf16, t, begin, &end);
    return end - begin;
}

/* Returns an integer that ranks an expert by its key: a greater integer for a greater key or, with equal keys, for a
 * lower expert number. A NaN gets the greatest integer, so that it reaches the result and is not hidden. */
static uint64_t rank(float key, long expert) {
    uint32_t bits;
    key += 0.0f; /* -0 equals 0 */
    memcpy(&bits, &key, 4);
    bits = key != key ? UINT32_MAX : bits >> 31 ? ~bits : bits | 1u << 31;
    return (uint64_t)bits << 32 | (uint32_t)~expert;
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static float highest(const float *logits, long count) {
    float most = logits[0];
    for (long i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
    return most;
}

static float sum_of_exponentials(const float *logits, long count, float most) {
    float sum = 0;
    for (long i = 0; i < count; i++) sum += expf(logits[i] - most);
    return sum;
}

/* Sets the weights to exponentials of the chosen experts' logits. The caller divides them by the returned sum to get a
 * softmax: over the chosen experts if `normalized`, else over all experts. */
static float exponentials(const Experts *e, const float *logits, const int32_t *numbers, float *weights) {
    float sum = 0, most = logits[numbers[0]];
    if (e->choice_bias && e->normalized) /* the first chosen expert may not be the most likely one */
        for (long i = 1; i < e->chosen; i++) most = logits[numbers[i]] > most ? logits[numbers[i]] : most;
    if (e->choice_bias && !e->normalized) most = highest(logits, e->count);
    for (long i = 0; i < e->chosen; i++) {
        weights[i] = expf(logits[numbers[i]] - most);
        sum += weights[i];
    }
    return e->normalized ? sum : sum_of_exponentials(logits, e->count, most);
}

/* Sets the weights to sigmoids of the chosen experts' logits. Returns the divisor for the weights: their sum if
 * `normalized`, else 1. */
static float sigmoids(const Experts *e, const float *logits, const int32_t *numbers, float *weights) {
    float sum = 1e-20f; /* starts above 0, because all sigmoids may be zero */
    for (long i = 0; i < e->chosen; i++) {
        weights[i] = sigmoid(logits[numbers[i]]);
        sum += weights[i];
    }
    return e->normalized ? sum : 1.0f;
}

/* The softmax of a row's logits: exp(logit - most) / sum. It is only set if a bias is added to it. */
typedef struct {
    float most, sum;
} Softmax;

static Softmax softmax_of(const Experts *e, const float *logits) {
    if (!e->choice_bias || e->sigmoid) return (Softmax){0, 1};
    float most = highest(logits, e->count);
    return (Softmax){most, sum_of_exponentials(logits, e->count, most)};
}

/* Returns the number by which an expert is compared with others when experts are chosen. */
static float choice_key(const Experts *e, const float *logits, long expert, const Softmax *all) {
    float logit = logits[expert];
    if (!e->choice_bias) return logit;
    return (e->sigmoid ? sigmoid(logit) : expf(logit - all->most) / all->sum) + e->choice_bias[expert];
}

/* Returns the number that an expert adds to its group's score if it is one of the best of the group. If only the best
 * one counts, choice_key has the same order. highest: the row's highest logit */
static float share_of_score(const Experts *e, const float *logits, long expert, float highest, const Softmax *all) {
    if (e->best_of_group == 1 || e->choice_bias) return choice_key(e, logits, expert, all);
    return e->sigmoid ? sigmoid(logits[expert]) : expf(logits[expert] - highest); /* a softmax, but for a factor */
}

/* Returns the score of the group whose first expert is `begin`. A NaN makes the score NaN. */
static float group_score(const Experts *e, const float *logits, long begin, long size, float highest,
                         const Softmax *all) {
    float best = -INFINITY, second = -INFINITY;
    for (long expert = begin; expert < begin + size; expert++) {
        float share = share_of_score(e, logits, expert, highest, all);
        if (share != share) return share;
        if (share > best)
            second = best, best = share;
        else if (share > second)
            second = share;
    }
    return e->best_of_group == 2 ? best + second : best;
}

/* Writes for each group whether it is among the chosen ones. Of groups with equal scores, the first is chosen. */
static void choose_groups(const Experts *e, const float *logits, const Softmax *all, int *is_chosen) {
    uint64_t ranks[MAX_GROUPS];
    float highest = -INFINITY;
    for (long i = 0; i < e->count; i++) highest = logits[i] > highest ? logits[i] : highest;
    long size = e->count / e->groups;
    for (long g = 0; g < e->groups; g++) ranks[g] = rank(group_score(e, logits, g * size, size, highest, all), g);
    for (long g = 0; g < e->groups; g++) {
        long before = 0;
        for (long other = 0; other < e->groups; other++) before += ranks[other] > ranks[g];
        is_chosen[g] = before < e->chosen_groups;
    }
}

/* Writes the experts chosen for one row, the most likely first, and their routing weights. */
static void choose(const Experts *e, const float *logits, int32_t *numbers, float *weights) {
    uint64_t best[MAX_CHOSEN]; /* the greatest ranks found until now, descending */
    const Softmax all = softmax_of(e, logits);
    int in_group[MAX_GROUPS] = {1};
    if (e->groups > 1) choose_groups(e, logits, &all, in_group);
    for (long expert = 0, found = 0, size = e->count / e->groups; expert < e->count; expert++) {
        if (e->groups > 1 && !in_group[expert / size]) continue;
        uint64_t here = rank(choice_key(e, logits, expert, &all), expert);
        if (found == e->chosen && here < best[found - 1]) continue;
        long i = found < e->chosen ? found++ : found - 1;
        for (; i > 0 && best[i - 1] < here; i--) best[i] = best[i - 1];
        best[i] = here;
    }
    for (long i = 0; i < e->chosen; i++) numbers[i] = (int32_t)~(uint32_t)best[i];
    float divisor = (e->sigmoid ? sigmoids : exponentials)(e, logits, numbers, weights);
    for (long i = 0; i < e->chosen; i++) weights[i] = weights[i] / divisor * (e->scales ? e->scales[numbers[i]] : 1);
}

EXPORT void experts_choose(const Experts *e, const float *logits, long t, int32_t *numbers, float *weights) {
    for (long row = 0; row < t; row++)
        choose(e, logits + row * e->count, numbers + row * e->chosen, weights + row * e->chosen);
}

/* Sorts the slots by expert. The sort is stable. */
static void sort_slots(Call *c) {
    memset(c->ends, 0, c->e->count * sizeof(*c->ends));
    for (long slot = 0; slot < c->slots; slot++) c->ends[c->numbers[slot]]++;
    for (long expert = 0, begin = 0; expert < c->e->count; expert++) {
        if (c->e->loads) c->e->loads[expert] += c->ends[expert];
        begin += c->ends[expert];
        c->ends[expert] = begin - c->ends[expert]; /* the first place; the next loop advances it to the end */
    }
    for (long slot = 0; slot < c->slots; slot++) {
        long place = c->ends[c->numbers[slot]]++;
        c->places[slot] = place, c->rows[place] = slot / c->e->chosen;
    }
}

/* Copies each place's row to `narrow`, so that the rows of an expert are contiguous. If the step has a single row,
 * nothing is copied. */
static void gather(Call *c) {
    long row = c->hidden * c->size;
    if (c->t == 1) return;
#pragma omp parallel for num_threads(c->threads) if (c->t >= MIN_PARALLEL_ROWS)
    for (long place = 0; place < c->slots; place++) memcpy(c->narrow + place * row, c->h + c->rows[place] * row, row);
}

/* Multiplies for every expert the rows at its places by its weight. x: a row for each place; NULL: all places have the
 * only row of h. Returns 0, or 1 when memory is exhausted. */
static int multiply(Call *c, const Weight *weights, const char *x, long k, char *out, long row_bytes, int out_bf16) {
    long jobs = 0;
    for (long expert = 0, begin = 0; expert < c->e->count; begin = c->ends[expert++]) {
        long rows = c->ends[expert] - begin;
        const char *from = x ? x + begin * k * c->size : c->h; /* x is NULL only if h has a single row */
        if (rows) c->jobs[jobs++] = (GemmJob){&weights[expert], from, out + begin * row_bytes, rows};
    }
    return c->kernels->gemm(c->jobs, jobs, out_bf16, c->threads);
}

/* Returns this rank's columns of `add` [t, H]. Returns `add` itself if it is NULL or the rank has all columns. */
static const char *own_columns(Call *c, const char *add) {
    if (!add || c->own == c->hidden) return add;
    long bytes = c->own * c->size, row = c->hidden * c->size, begin = c->e->ranks->rank * bytes;
    for (long i = 0; i < c->t; i++) memcpy(c->added + i * bytes, add + i * row + begin, bytes);
    return c->added;
}

EXPORT int experts_forward(const Experts *e, const ExpertKernels *kernels, const char *router_input, const char *h,
                           const char *add, const float *add_gate, char *out, long t, char *scratch, int threads) {
    char *end;
    int is_bf16 = kernels->is_bf16;
    Call c = call_in(e, is_bf16, t, scratch, &end);
    c.kernels = kernels, c.h = h, c.threads = threads;
    GemmJob router = {e->router, router_input ? router_input : h, (char *)c.logits, t};
    if (kernels->gemm(&router, 1, 0, threads)) return 1;
#pragma omp parallel for num_threads(threads) if (t >= MIN_PARALLEL_ROWS)
    for (long row = 0; row < t; row++)
        choose(e, c.logits + row * e->count, c.numbers + row * e->chosen, c.weights + row * e->chosen);
    sort_slots(&c);
    gather(&c);
    long outputs = count_columns(e->gate_up);
    if (multiply(&c, e->gate_up, t == 1 ? NULL : c.narrow, c.hidden, c.wide, outputs * c.size, is_bf16)) return 1;
    if (outputs == c.inner) /* experts without a gate */
        kernels->activate(c.wide, c.narrow, NULL, c.slots, c.inner, e->activation, threads);
    else
        kernels->act_and_mul(c.wide, c.wide + c.inner * c.size, c.narrow, c.slots, c.inner, 2 * c.inner, 2 * c.inner,
                             e->activation, threads);
    Ranks *ranks = e->ranks;
    const char *inner = c.narrow;
    if (ranks) inner = ranks_gathered(ranks, c.narrow, c.gathered, c.slots, c.inner * c.size, threads);
    if (!inner || multiply(&c, e->down, inner, e->down->k, c.wide, c.own * 4, 0)) return 1;
    kernels->combine((const float *)c.wide, c.places, c.weights, own_columns(&c, add), add_gate, ranks ? c.mixed : out,
                     t, e->chosen, c.own, threads);
    return ranks ? ranks_gather(ranks, c.mixed, out, t, c.own * c.size, threads) : 0;
}
