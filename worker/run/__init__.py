"""A step on the device. Every module that knows both plans and tensors is here.

Inputs, from a plan to tensors:
inputs              a plan as ForwardInputs
sampler             the sampling parameters of a batch
grammar_mask        bitmasks of the tokens that grammars allow
graph_inputs        the inputs of a captured decode, at fixed addresses

Execution, from tensors to ids:
runner              launch(plan): inputs, forward, sampling
in_flight           a step that has been launched and not read
logprobs            log-probabilities
graphs, graph_capture       decodes as CUDA graphs; one decode of fixed shape and its capture

Before serving:
warmup              dummy steps compile every kernel and measure memory
kernel_check        compares Triton's kernels with plain PyTorch
"""
