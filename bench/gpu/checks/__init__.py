"""Checks whether the GPU computes correctly: section `correct`.

correctness         the section: runs cases, and the checks of whole steps
cases, cases_kv     inputs for each kernel, and what its PyTorch form gives for them
random_inputs       a case, and random tensors
determinism         same bits in every batch and chunking; same tokens by every path
"""
