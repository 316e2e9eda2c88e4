/* What LoRA adapters add to linears: the rows of an adapter get scale * factors * (x A B) added to their output.
 * worker/kernels/cpu/adapters_c.py has the same fields, in the same order. */
#pragma once
#include "../experts.h"

/* Adds scale * factors * product to y; all have n numbers. */
typedef void AddProduct(char *y, const float *product, const float *factors, long n, float scale);

/* B of some modules, which change neighbouring columns of a linear. b: `ranks` outputs of A, padded with zeros to b->k,
 * → the columns that begin at `column`. */
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

typedef struct {
    const AdapterRows *adapters;
    long count;
    AddProduct *add;
} StepAdapters;

/* Computes all jobs with what adapters add to them. Returns 0, or 1 when memory is exhausted. */
int multiply_with_adapters(const StepAdapters *s, Gemm *gemm, const GemmJob *jobs, long count, int is_bf16, int threads);
