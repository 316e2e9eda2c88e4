"""The C library for CPUs. Its sources are in csrc/.

build               compiles the library
instruction_set     the instruction sets, and the variable that caps them
library             chooses the functions for this processor's instruction set
limits              the largest sizes that the library's arrays hold
huge_pages          memory that is read without TLB misses
packed_weight       packs weights, plain or quantized, for the matmul
packed_experts      packs the weights of all experts of a layer
bindings            the functions of the library, for tensors
recurrent/          the C functions for recurrent layers, for tensors
experts_c           the experts of a layer, for tensors
adapters_c          what LoRA adapters add to linears
decoder_c           all layers of a decoder in one call
floors              measures the most that the machine reads and multiplies in a second
ranks_c             exchanges rows between processes that share a model
openmp              sets how OpenMP threads wait
"""
