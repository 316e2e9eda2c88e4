"""A step on the device. Every module that knows both plans and tensors is here.

runner              launch(plan): inputs, forward, sampling
inputs              a plan laid out as tensors
sampler             sampling parameters of a batch
grammar_mask        bitmasks of the tokens that grammars allow
logprobs            log-probabilities
in_flight           a step that is launched and not read yet
graphs, graph_inputs    decode steps recorded as CUDA graphs; their inputs at fixed addresses
warmup              compiles and measures before serving
kernel_check        compares Triton's kernels with plain PyTorch before serving
"""
