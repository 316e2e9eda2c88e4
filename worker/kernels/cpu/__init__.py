"""The C library for CPUs. Its sources are in csrc/.

build               compiles the library
library             chooses the functions for this processor's instruction set
bindings            its functions on tensors
decoder_c           all layers of a decoder in one call
openmp              how OpenMP threads wait
"""
