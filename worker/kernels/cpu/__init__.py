"""The C library for CPUs. Its sources are in csrc/.

build               compiles the library
instruction_set     the instruction sets, and the variable that caps them
library             chooses the functions for this processor's instruction set
huge_pages          memory that is read without TLB misses
packed_weight       packs weights, plain or quantized, for the matmul
packed_experts      packs the weights of all experts of a layer
bindings            the functions of the library, for tensors
delta_net           the gated delta rule, for tensors
mamba2              Mamba-2, for tensors
recurrent_c         what recurrent layers have besides linears, for decoder_c
short_conv          short convolutions, for tensors
experts_c           the experts of a layer, for tensors
decoder_c           all layers of a decoder in one call
floors              measures what the machine does at most
openmp              sets how OpenMP threads wait
"""
