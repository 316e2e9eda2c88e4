"""The C library for CPUs. Its sources are in csrc/.

build               compiles the library
instruction_set     names the instruction sets, and reads the variable that limits them
library             chooses the functions for this processor's instruction set
limits              the largest sizes that the library's arrays hold
huge_pages          memory that is read without TLB misses
packed_weight       packs weights, plain or quantized, for the matmul
packed_experts      packs the weights of all experts of a layer
bindings            calls the library's functions with tensors
recurrent/          calls the functions for recurrent layers with tensors
experts_c           calls the functions for a mixture of experts with tensors
adapters_c          passes a step's LoRA adapters to the library
decoder_c           computes all layers of a decoder in one call
floors              measures how fast the machine reads memory and multiplies at most
ranks_c             exchanges rows between processes that share a model
openmp              sets how OpenMP threads wait
"""
