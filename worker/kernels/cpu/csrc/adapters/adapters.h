/* What LoRA adapters add to linears: the rows of an adapter get scale * factors * (x A B) added to their output.
 * worker/kernels/cpu/adapters_c.py has the same fields, in the same order. */
#pragma once
#include "../experts.h"

/* Adds scale * factors * product to y; all have n numbers. */
typedef void AddProduct(char *y, const float *product, const float *factors, long n, float scale);

/* The matrix B of modules whose outputs are neighbouring columns of a linear, from `column` on. Its inputs are `ranks`
 * outputs of A from `first_rank` on, padded with zeros to b->k. */
typedef struct {
    const Weight *b;
    long first_rank, ranks, column;
} ProductPart;

/* What an adapter adds to a linear. */
typedef struct {
    const Weight *changed, *a; /* a: inputs of `changed` → ranks of all modules */
    const ProductPart *parts;
    long part_count;
    const float *factors; /* by column of `changed` */
} Product;

/* The rows of a step that have an adapter with a scale. */
typedef struct {
    const Product *products; /* ascending by the address `changed` */
    long product_count;
    const int64_t *rows; /* ascending */
    long count;
    float scale;
} AdapterRows;

/* What an adapter adds to one job. low [rows, ranks]: the outputs of A; b: the jobs of the parts, if tiles multiply them */
typedef struct {
    const GemmJob *job;
    const Product *product;
    const AdapterRows *rows;
    char *low;
    const GemmJob *b;
} Change;

/* Columns [from, to) of A for at most FEW_ROWS rows, and of a part for rows [row, end) of an adapter (few_rows.c). `from`
 * is a multiple of 32. */
#define FEW_ROWS 4
typedef void MultiplyA(const Change *c, long from, long to);
typedef void AddB(const Change *c, const ProductPart *part, long from, long to, long row, long end);

typedef struct {
    const AdapterRows *adapters;
    long count;
    AddProduct *add_product;
    MultiplyA *multiply_a;
    AddB *add_b;
    int in_tiles; /* whether the matmul multiplies more than FEW_ROWS rows in tiles, which are faster than `add_b` */
} StepAdapters;

/* Computes all jobs with what adapters add to them. Returns 0, or 1 when memory is exhausted. */
int multiply_with_adapters(const StepAdapters *s, Gemm *gemm, const GemmJob *jobs, long count, int is_bf16, int threads);
