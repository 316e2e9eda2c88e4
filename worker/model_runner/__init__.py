"""Runs a step on the device. Every module that works on both plans and tensors is here.

Inputs, from a plan to tensors:
inputs              makes ForwardInputs from a plan
column_values       computes each input tensor (column) of a step
sampler             makes the sampling parameters of a batch
grammar_mask        masks the tokens that grammars forbid
graphs/             captures and replays steps as CUDA graphs

Execution, from tensors to ids:
model               the interface of a model, and of one in stages
runner              launch(plan): inputs, forward, sampling
adapted             prepares steps with LoRA adapters or pictures
in_flight           a step that is launched but not read yet
pooling             makes one vector from a prompt
logprobs            computes log-probabilities

Before serving:
warmup              runs dummy steps, which compile every kernel and measure memory
drafters/           models that propose draft tokens
checks/             checks before serving that fast kernels and options compute the right bits
"""
