"""Checks before serving that kernels, options and batches give the right bits.

kernel_check        compares Triton's kernels with plain PyTorch
option_check        compares steps with and without the options of --gpu-options
bits_check          checks that the bits of a row depend on no other row
check_inputs        the decoder and the sequences that these two checks compute
library_check       finds which products the vendor's library computes with the same bits
"""
