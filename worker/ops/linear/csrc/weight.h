/* The struct of a packed weight [n, k]. linear/native.py fills it: WeightStruct there has the same fields, in the same
 * order.
 *
 * A weight consists of panels of 32 columns (columns of the product, rows of the weight). Plain panels hold numbers of
 * the kernel's dtype: fp32 [k][32], or bf16 in pairs [k/32][2 halves][16 pairs][16 columns][2].
 *
 * Panels of codes are cut along k into groups. A group holds 32 scales, 32 minimums (if the format has them), then its
 * codes in blocks of 16 inputs. The order of codes in a block depends on the kernel that reads them (CodeOrder). */
#pragma once
#include <stdint.h>

#define PANEL 32      /* columns of a panel */
#define CODE_BLOCK 16 /* inputs of a block of codes */
#define RAISED_SIX_BITS 32 /* by how much 6-bit codes are raised, so that the lowest is not below 0 */

/* The kinds of numbers. 4-bit codes have a table of values. Codes of the INTEGER kinds are multiplied as integers. They
 * stand for integers of 6 or 8 bits or, if they have 4 bits, for multiples of 0.5. The INT8_INPUTS kinds are such codes, too,
 * of 4, 6 or 8 bits, for inputs that are rounded to 8 bits first (int8_rows.h). */
enum { PLAIN, TABLE4, INT8, E4M3, INTEGER4, INTEGER6, INTEGER8, INT8_INPUTS4, INT8_INPUTS6, INT8_INPUTS8 };

/* The order of codes in a block, by what the kernel multiplies: fp32, pairs of bf16, integers of 16 or of 8 bits
 * (pack_codes.c). */
typedef enum { FOR_FP32, FOR_BF16_PAIRS, FOR_INTEGERS, FOR_INT8 } CodeOrder;

typedef struct Weight {
    const char *panels;
    const float *bias;          /* [n] or NULL */
    const int64_t *input_order; /* [k] or NULL: row i of the packed weight belongs to input input_order[i] */
    const float *values;        /* [16]: the numbers of 4-bit codes */
    const struct Weight *next;  /* the weight of the columns after these n columns, in another format; NULL: there are
                                   no more */
    long n, k, group;           /* group: how many inputs share a scale, a multiple of CODE_BLOCK */
    int kind, has_minimum, scale_bytes; /* scale_bytes: 4 if scales and minimums are fp32, 2 if they are fp16 */
    float factor;                       /* by which stored scales and minimums are multiplied */
} Weight;

/* One linear applied to some rows. */
typedef struct {
    const Weight *weights; /* a list of weights that together have all columns */
    const char *x;         /* [t, k], inputs in the order of the layer */
    char *out;             /* [t, columns] */
    long t;                /* how many rows; may be 0 */
} GemmJob;

/* Returns the total number of columns of w and all weights after it in the list. */
static inline long count_columns(const Weight *w) {
    long columns = 0;
    for (; w; w = w->next) columns += w->n;
    return columns;
}

static inline int has_four_bits(const Weight *w) { return w->kind == INTEGER4 || w->kind == TABLE4 || w->kind == INT8_INPUTS4; }

static inline int code_bits(const Weight *w) {
    return has_four_bits(w) ? 4 : w->kind == INTEGER6 || w->kind == INT8_INPUTS6 ? 6 : 8;
}

static inline long code_block_bytes(const Weight *w) { return CODE_BLOCK * PANEL * code_bits(w) / 8; }

static inline long group_head_bytes(const Weight *w) { return PANEL * w->scale_bytes * (1 + w->has_minimum); }

static inline long group_bytes(const Weight *w) {
    return group_head_bytes(w) + w->group / CODE_BLOCK * code_block_bytes(w);
}

static inline long group_count(const Weight *w) { return (w->k + w->group - 1) / w->group; }

static inline const char *group_at(const Weight *w, long panel, long group) {
    return w->panels + (panel * group_count(w) + group) * group_bytes(w);
}
