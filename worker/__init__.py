"""A worker process: it schedules, computes and samples on one device.

__main__            the process: binds its sockets, loads the model, serves, drains
transport/          the ZeroMQ sockets, on an I/O thread
engine/             loads the model; the compute loop, the request table, the crash journal
ranks/              tensor parallelism: several processes (ranks) compute one model together
follower            the process of a rank other than 0
host_follower       the process of a rank other than 0 on another host
spec                describes a model as data: sizes, norms, biases, layers
schedule/           decides which tokens the next step computes; works on plain integers
kv_cache/           K/V pages: owners, prefix cache, tensors, sizes
kv_events/          tells external routers which pages are in the prefix cache
vision/             pictures: a vision encoder, its cache, and the rows of a step that pictures replace
run/                runs a planned step on tensors: inputs, forward, sampling, CUDA graphs
model/              the decoder, and how it is made from a checkpoint
kernels/            the operations: reference versions in PyTorch, Triton for GPUs, C for CPUs
grammar/            structured output: compiled grammars and their state
observability/      metrics and statistics
"""
