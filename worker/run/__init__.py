"""Runs a step on the device. Every module that works on both plans and tensors is here.

Inputs, from a plan to tensors:
inputs              makes ForwardInputs from a plan
sampler             makes the sampling parameters of a batch
grammar_mask        masks the tokens that grammars forbid
graph_inputs        holds the inputs of captured steps at fixed addresses
page_lanes          keeps the page tables of running sequences on the device

Execution, from tensors to ids:
runner              launch(plan): inputs, forward, sampling
in_flight           a step that is launched but not read yet
pooling             makes one vector of a prompt
logprobs            computes log-probabilities
graphs              runs steps as CUDA graphs
graph_shapes        lists the shapes that are captured, and finds that of a step
graph_capture       captures the forward of one shape
graph_sampling      captures the sampling of plain rows
graph_self_test     makes the dummy steps that graphs are tested with

Before serving:
warmup              runs dummy steps, which compile every kernel and measure memory
kernel_check        compares Triton's kernels with plain PyTorch
option_check        compares steps with and without the options of --gpu-options
bits_check          checks that the bits of a row depend on no other row
check_inputs        the decoder and the sequences that these two checks compute
library_check       finds which products the vendor's library computes with the same bits
"""
