/* Chooses a token for each row by temperature, top-k, top-p and min-p, and computes log-probabilities.
 * worker/ops/sampling/reference.py defines the results. Weights are integers, so all sums are exact in any order. Only
 * e^x may differ from PyTorch's in its last bit.
 *
 * A row is read twice: for its highest logit, and for all weights. What top-k or top-p keeps is then a beginning of the
 * few tokens that can be kept at all, in the order of their distance from the highest logit ("gap") and their ids. */
#include "rows.h"
#include <math.h>
#include <omp.h>
#include <stddef.h>

#define ONE 0x1p40f /* the weight of the most likely token */
#define BLOCK 512   /* tokens; the sum of so many weights is exact in fp64 */
#define DIGIT 11    /* bits by which one pass of a sort orders */

typedef double vd __attribute__((vector_size(4 * SIMD_WIDTH)));
typedef float vhalf __attribute__((vector_size(2 * SIMD_WIDTH)));

#if SIMD_WIDTH == 16
INLINE vf simd_trunc(vf x) { return (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
INLINE unsigned at_most(vf x, float bound) {
    return _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(bound), _CMP_LE_OQ);
}
#else
INLINE vf simd_trunc(vf x) { return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
INLINE unsigned at_most(vf x, float bound) { return _mm256_movemask_ps((__m256)(x <= broadcast(bound))); }
#endif

/* How one row is sampled. The columns of PlainParams in reference.py, without greedy rows. */
typedef struct {
    float temperature, top_p, min_p;
    int64_t top_k;
    double u; /* the random number in (0, 1) */
} Params;

/* Memory for one row. An entry has a gap's bits above a token's id. */
typedef struct {
    float *gaps, *weights; /* [V, padded to whole registers] */
    double *sums;          /* [blocks]: of weights */
    float *least;          /* [blocks]: the smallest gap */
    uint64_t *entries, *spare; /* [V, at least the number of blocks] */
} Scratch;

INLINE long padded(long width) { return (width + BLOCK - 1) / BLOCK * BLOCK; }

INLINE uint64_t entry_of(float gap, long id) {
    uint32_t bits;
    __builtin_memcpy(&bits, &gap, 4);
    return (uint64_t)bits << 32 | (uint64_t)id;
}

INLINE float gap_of(uint64_t entry) {
    uint32_t bits = entry >> 32;
    float gap;
    __builtin_memcpy(&gap, &bits, 4);
    return gap;
}

INLINE int64_t weight_of(const Scratch *s, uint64_t entry) { return (int64_t)s->weights[(uint32_t)entry]; }

/* Loads part of a row; what is beyond its end is -inf. */
INLINE vf load_logits(const float *logits, long i, long width) {
    if (i + SIMD_WIDTH <= width) return load_f32(logits + i);
    float tail[SIMD_WIDTH];
    for (long j = 0; j < SIMD_WIDTH; j++) tail[j] = i + j < width ? logits[i + j] : -INFINITY;
    return load_f32(tail);
}

/* Returns the highest logit; NaN if any is. */
static float highest(const float *logits, long width) {
    vf top = broadcast(-INFINITY);
    vi is_nan = {0};
    for (long i = 0; i < width; i += SIMD_WIDTH) {
        vf x = load_logits(logits, i, width);
        top = simd_max(top, x);
        is_nan |= (vi)(x != x);
    }
    for (int i = 0; i < SIMD_WIDTH; i++)
        if (is_nan[i]) return NAN;
    return simd_reduce_max(top);
}

/* Returns the lowest id with the highest logit, or the first NaN. */
static int64_t first_highest(const float *logits, long width, float peak) {
    for (long i = 0; i < width; i++)
        if (logits[i] == peak || logits[i] != logits[i]) return i;
    return 0;
}

/* Sorts entries by their bits from `from` to `to`; those with equal bits keep their order. Returns where they are. */
static uint64_t *sorted(uint64_t *entries, uint64_t *spare, long count, int from, int to) {
    for (int shift = from; shift < to; shift += DIGIT) {
        uint32_t places[1 << DIGIT] = {0}, place = 0;
        for (long i = 0; i < count; i++) places[entries[i] >> shift & ((1 << DIGIT) - 1)]++;
        for (int digit = 0; digit < 1 << DIGIT; digit++) {
            uint32_t found = places[digit];
            places[digit] = place;
            place += found;
        }
        for (long i = 0; i < count; i++) spare[places[entries[i] >> shift & ((1 << DIGIT) - 1)]++] = entries[i];
        uint64_t *swapped = entries;
        entries = spare, spare = swapped;
    }
    return entries;
}

/* Writes gaps and weights, and their sums and least gaps by block; weights below `least_weight` become 0. Returns the
 * sum of all. */
static int64_t weigh(const float *logits, long width, float peak, float temperature, float least_weight, Scratch *s) {
    int64_t total = 0;
    for (long begin = 0, block = 0; begin < width; begin += BLOCK, block++) {
        vf least = broadcast(INFINITY);
        vd sum = {0};
        for (long i = begin; i < begin + BLOCK; i += SIMD_WIDTH) {
            vf gap = (broadcast(peak) - load_logits(logits, i, width)) / broadcast(temperature);
            vf weight = simd_trunc(simd_exp(-gap) * ONE);
            weight = simd_select(weight < least_weight, (vf){0}, weight);
            store_f32(s->gaps + i, gap);
            store_f32(s->weights + i, weight);
            least = simd_min(least, gap);
            for (int half = 0; half < 2; half++) {
                vhalf part;
                __builtin_memcpy(&part, (float *)&weight + half * (SIMD_WIDTH / 2), sizeof part);
                sum += __builtin_convertvector(part, vd);
            }
        }
        double whole = 0;
        for (int i = 0; i < SIMD_WIDTH / 2; i++) whole += sum[i];
        s->sums[block] = whole, s->least[block] = -simd_reduce_max(-least);
        total += (int64_t)whole;
    }
    return total;
}

/* Returns the weight that tokens kept by top-p must reach. */
INLINE int64_t needed(float top_p, int64_t total) {
    if (!(top_p < 1)) return total;
    int64_t need = (int64_t)ceil((double)top_p * (double)total);
    return need < 1 ? 1 : need < total ? need : total;
}

/* Returns a gap that no token among the `limit` nearest exceeds: in so many blocks, one token at least is as near. */
static float bound_for_top_k(long blocks, int64_t limit, Scratch *s) {
    if (limit > blocks) return INFINITY;
    for (long block = 0; block < blocks; block++) s->entries[block] = entry_of(s->least[block], block);
    return gap_of(sorted(s->entries, s->spare, blocks, 32, 64)[limit - 1]);
}

/* Returns a gap that no token kept by top-p exceeds: all tokens of smaller weights together are what may be missing. */
static float bound_for_top_p(long width, int64_t total, int64_t need, Scratch *s) {
    float smallest = nextafterf((float)(1 + (total - need) / width), 0); /* never rounded up */
    vf farthest = {0};
    for (long i = 0; i < width; i += SIMD_WIDTH) {
        vf gap = load_f32(s->gaps + i);
        farthest = simd_max(farthest, simd_select(load_f32(s->weights + i) >= smallest, gap, (vf){0}));
    }
    return simd_reduce_max(farthest);
}

/* Applies top-k, top-p and min-p. Returns the tokens that are left in the order of their ids, and writes their number
 * and the sum of their weights. */
static uint64_t *filter(long width, const Params *p, int64_t total, Scratch *s, long *left, int64_t *sum) {
    int64_t limit = p->top_k && p->top_k < width ? p->top_k : width;
    float bound = limit < width ? bound_for_top_k((width + BLOCK - 1) / BLOCK, limit, s)
                                : bound_for_top_p(width, total, needed(p->top_p, total), s);
    long count = 0;
    for (long i = 0; i < width; i += SIMD_WIDTH)
        for (unsigned near = at_most(load_f32(s->gaps + i), bound); near; near &= near - 1) {
            long id = i + __builtin_ctz(near);
            if (id < width) s->entries[count++] = entry_of(s->gaps[id], id);
        }
    uint64_t *entries = sorted(s->entries, s->spare, count, 32, 64);
    if (limit < width) {
        count = limit < count ? limit : count, total = 0;
        for (long i = 0; i < count; i++) total += weight_of(s, entries[i]);
    }
    int64_t need = needed(p->top_p, total), reached = 0, least = (int64_t)((double)p->min_p * ONE);
    *left = 0, *sum = 0;
    for (long i = 0; i < count && reached < need; i++) {
        int64_t weight = weight_of(s, entries[i]);
        reached += weight;
        if (weight >= least) entries[(*left)++] = (uint32_t)entries[i], *sum += weight;
    }
    return sorted(entries, entries == s->entries ? s->spare : s->entries, *left, 0, 32);
}

INLINE int64_t target_of(double u, int64_t total) {
    int64_t target = (int64_t)(u * (double)total);
    return target < total ? target : total - 1;
}

/* Returns the first id whose cumulative weight exceeds u times the sum of all. */
static int64_t draw(const float *logits, long width, float peak, const Params *p, Scratch *s) {
    int filters = (p->top_k && p->top_k < width) || p->top_p < 1;
    int64_t least = (int64_t)((double)p->min_p * ONE);
    float least_weight = (float)least; /* rounded up: a weight has 24 bits */
    if ((int64_t)least_weight < least) least_weight = nextafterf(least_weight, INFINITY);
    int64_t total = weigh(logits, width, peak, p->temperature, filters ? 0 : least_weight, s), reached = 0;
    if (filters) {
        long left;
        uint64_t *entries = filter(width, p, total, s, &left, &total);
        int64_t target = target_of(p->u, total);
        for (long i = 0; i < left; i++)
            if ((reached += weight_of(s, entries[i])) > target) return (int64_t)entries[i];
        return 0;
    }
    int64_t target = target_of(p->u, total);
    for (long begin = 0, block = 0; begin < width; begin += BLOCK, block++) {
        if (reached + (int64_t)s->sums[block] <= target) {
            reached += (int64_t)s->sums[block];
            continue;
        }
        for (long id = begin;; id++)
            if ((reached += (int64_t)s->weights[id]) > target) return id;
    }
    return 0;
}

/* Sebastiano Vigna's splitmix64. */
INLINE uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

INLINE double uniform(int64_t seed, int64_t position) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    uint64_t state = mixed((uint64_t)seed + golden) + ((uint64_t)position + 1) * golden;
    return ((double)(mixed(state) >> 12) + 0.5) * 0x1p-52;
}

/* Returns bits that are in the opposite order of the numbers. */
INLINE uint32_t descending(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits >> 31 ? bits : ~bits & 0x7fffffff;
}

/* Writes the `top` highest logits, at most as many as the row has, and their ids: the highest first, and of equal ones
 * the lowest id. */
static void find_best(const float *logits, long width, long top, int64_t *ids, float *values, Scratch *s) {
    long blocks = padded(width) / BLOCK, count = 0;
    float bound = -INFINITY; /* in `top` blocks, one logit at least is as high */
    if (top <= blocks) {
        for (long block = 0; block < blocks; block++) {
            vf most = broadcast(-INFINITY);
            for (long i = block * BLOCK; i < (block + 1) * BLOCK; i += SIMD_WIDTH)
                most = simd_max(most, load_logits(logits, i, width));
            s->least[block] = simd_reduce_max(most);
            s->entries[block] = (uint64_t)descending(s->least[block]) << 32 | (uint64_t)block;
        }
        bound = s->least[(uint32_t)sorted(s->entries, s->spare, blocks, 32, 64)[top - 1]];
    }
    for (long i = 0; i < width; i += SIMD_WIDTH)
        for (unsigned high = at_most(-load_logits(logits, i, width), -bound); high; high &= high - 1) {
            long id = i + __builtin_ctz(high);
            if (id < width) s->entries[count++] = (uint64_t)descending(logits[id]) << 32 | (uint64_t)id;
        }
    uint64_t *entries = sorted(s->entries, s->spare, count, 32, 64);
    for (long i = 0; i < top; i++) {
        ids[i] = i < count ? (int64_t)(uint32_t)entries[i] : 0; /* a NaN is no entry */
        values[i] = logits[ids[i]];
    }
}

/* Returns the bytes of memory that each thread needs for rows of this width. */
__attribute__((visibility("default"))) long JOIN(sample_scratch, SUFFIX)(long width) {
    long size = padded(width), blocks = size / BLOCK;
    return size * (2 * sizeof(float) + 2 * sizeof(uint64_t)) + blocks * 2 * sizeof(double);
}

static Scratch scratch_of_thread(char *scratch, long width) {
    long size = padded(width), blocks = size / BLOCK;
    Scratch s;
    s.entries = (uint64_t *)(scratch + omp_get_thread_num() * JOIN(sample_scratch, SUFFIX)(width));
    s.spare = s.entries + size;
    s.sums = (double *)(s.spare + size);
    s.gaps = (float *)(s.sums + blocks);
    s.weights = s.gaps + size;
    s.least = s.weights + size;
    return s;
}

/* Chooses a token for each row of logits. stride: elements from a row to the next one. The parameters are columns with
 * one number for each row. scratch: of sample_scratch(width) bytes for each thread. A row whose highest logit is not
 * finite gets 0, or its first NaN if it is greedy. */
EXPORT(sample)(const float *logits, long rows, long width, long stride, const float *temperature, const float *top_p,
               const float *min_p, const int64_t *top_k, const int64_t *seeds, const int64_t *positions, char *scratch,
               int64_t *ids, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        Scratch s = scratch_of_thread(scratch, width);
        const float *own = logits + row * stride;
        float peak = highest(own, width) + 0.0f; /* the sum turns -0.0 into 0.0 */
        Params p = {temperature[row], top_p[row], min_p[row], top_k[row], uniform(seeds[row], positions[row])};
        ids[row] = p.temperature == 0 ? first_highest(own, width, peak) : isfinite(peak) ? draw(own, width, peak, &p, &s) : 0;
    }
}

/* Computes log-probabilities of each row: that of the token ids[row], and those of the `top` most likely tokens, with
 * their ids; `top` is at most the width. scratch: as for sample. */
EXPORT(logprobs)(const float *logits, long rows, long width, long stride, const int64_t *ids, long top, char *scratch,
                 float *chosen, int64_t *best, float *values, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        Scratch s = scratch_of_thread(scratch, width);
        const float *own = logits + row * stride;
        float peak = highest(own, width);
        float norm = peak + (float)log((double)weigh(own, width, peak, 1.0f, 0, &s) / (double)ONE);
        chosen[row] = own[ids[row]] - norm;
        if (top) find_best(own, width, top, best + row * top, values + row * top, &s);
        for (long i = row * top; i < (row + 1) * top; i++) values[i] -= norm;
    }
}
