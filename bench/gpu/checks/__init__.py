"""Checks whether the GPU computes correctly: section `correct`.

correctness         the section: runs the cases of each kernel, and the checks of whole steps
cases               inputs for each kernel, and the expected result from its PyTorch form
cases_kv            the same for kernels that read or write K/V
cases_few_bits      the same for products with weights in groups
cases_experts       the same for the experts of a layer
random_inputs       the type of a case, and random tensors
row_bits            checks for the same bits of a matrix product's row with any number of rows
determinism         checks for the same bits in every batch and chunking, and the same tokens by every path
"""
