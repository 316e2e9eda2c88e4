"""Checks whether the GPU computes correctly: section `correct`.

correctness         the section: runs the cases of each kernel, and the checks of whole steps
cases               inputs for each kernel, and the expected result from its PyTorch form
cases_kv            cases of kernels that read or write K/V
cases_few_bits      cases of matrix products with weights in quantization groups
cases_experts       cases of a layer's experts
random_inputs       the type of a case, and random tensors
row_bits            checks that a matrix product's row has the same bits with any number of rows
determinism         checks for the same bits in every batch and chunking, and the same ids in every configuration
"""
