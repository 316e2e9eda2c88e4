"""Measurements: each module measures one or more sections of `sluice bench gpu`.

device_limits       copy bandwidth, GEMM rate, launch times: the limits that other sections refer to
decode, prefill     steps of the worker's whole loop
isolated_kernels    sections attention, linear and kernels: each kernel on its own
library_bits        whether cuBLAS gives the same bits as our matrix products, in section linear
tile_sweep          candidate tiles for products
experts             the experts of a layer, in each format
graph_capture       time and memory to capture CUDA graphs at start
idle                time in which the device waits between steps
ablations           steps with single optimizations switched off
trace               kernels of a decode step, from the profiler
startup             from the start of `sluice serve` to the first token
ranks               decodes and a prompt on several GPUs that compute one model together
served              workloads over HTTP
transformers_peer   the same workloads through transformers' continuous batching
"""
