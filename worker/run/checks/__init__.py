"""Checks before serving that fast kernels and options compute the right bits on this device.

kernel_check        compares Triton kernels with plain PyTorch
option_check        compares steps with and without the options of --gpu-options
bits_check          checks that the bits of a row do not depend on other rows
check_inputs        makes the decoder and the sequences for kernel_check and bits_check
library_check       finds the matrix products that the vendor's library computes with the same bits
"""
