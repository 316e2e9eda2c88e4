"""A step on the device. Everything that knows plans and tensors is here.

runner                      launch(plan): pack, forward, sample
pack                        a plan laid out as tensors
sampler, constrain          what a batch asks of the sampling kernel; what grammars forbid
logprobs                    log-probabilities that were asked for
flight                      a step that is launched and not read yet
graphs, static              decodes recorded as CUDA graphs; their inputs at fixed addresses
warmup, verify              before serving: compile and measure; compare Triton's kernels with plain PyTorch
"""
