/* LoRA adapters: to the linear outputs of each row that uses an adapter, scale * factors * (x A B) is added. The
 * structures in worker/ops/linear/lora_native.py have the same fields, in the same order. */
#pragma once
#include "experts.h"

/* Computes y += scale * factors * product, element by element. y, factors and product have n elements each. */
typedef void AddProduct(char *y, const float *product, const float *factors, long n, float scale);

/* One matrix B of an adapter. It adds to b->n neighbouring columns of a linear's output, from `column` on. Its inputs
 * are `ranks` outputs of A, from `first_rank` on, padded with zeros to b->k. */
typedef struct {
    const Weight *b;
    long first_rank, ranks, column;
} ProductPart;

/* The matrices that an adapter adds to one linear. */
typedef struct {
    const Weight *changed, *a; /* changed: the linear; a: maps the inputs of the linear to the ranks of all modules */
    const ProductPart *parts;
    long part_count;
    const float *factors; /* a factor for each column of `changed` */
} Product;

/* The rows of a step that use the same adapter with the same scale. */
typedef struct {
    const Product *products; /* sorted by the address `changed`, ascending */
    long product_count;
    const int64_t *rows; /* ascending */
    long count;
    float scale;
} AdapterRows;

/* The addition of an adapter's product to one job. low: [rows, ranks], the outputs of A; b: the jobs that multiply by B
 * in AMX tiles, or NULL if tiles do not. */
typedef struct {
    const GemmJob *job;
    const Product *product;
    const AdapterRows *rows;
    char *low;
    const GemmJob *b;
} Change;

/* The kernels in few_rows.c. MultiplyA computes columns [from, to) of x A for at most FEW_ROWS rows. AddB computes
 * columns [from, to) of the product with a part's B, and adds them to the output, for those rows of the step that use
 * the adapter and have an index from `row` to `end` - 1 among them. `from` is a multiple of 32. */
#define FEW_ROWS 4
typedef void MultiplyA(const Change *c, long from, long to);
typedef void AddB(const Change *c, const ProductPart *part, long from, long to, long row, long end);

typedef struct {
    const AdapterRows *adapters;
    long count;
    AddProduct *add_product;
    MultiplyA *multiply_a;
    AddB *add_b;
    int in_tiles; /* if true, the matmul uses AMX tiles, which are faster than `add_b` for more than FEW_ROWS rows */
} StepAdapters;

/* Computes all jobs, and adds the adapters' products to their outputs. Returns 0, or 1 when memory is exhausted. */
int multiply_with_adapters(const StepAdapters *s, Gemm *gemm, const GemmJob *jobs, long count, int is_bf16, int threads);
