"""A worker process: it schedules, computes and samples on one device.

__main__            one process: binds its sockets, loads the model, serves, drains
transport/          the ZeroMQ sockets, on an I/O thread
engine/             loading, the compute loop, the request table, the crash journal
schedule/           which tokens the next step computes; plain integers
kv_cache/           K/V pages: owners, prefix cache, tensors, sizes
run/                a planned step as tensors: inputs, forward, sampling, CUDA graphs
model/              the decoder, and how a checkpoint becomes one
kernels/            the operations: their meaning in PyTorch, Triton for GPUs, C for CPUs
grammar/            structured output: compiled grammars and their state
observability/      metrics and statistics
"""
