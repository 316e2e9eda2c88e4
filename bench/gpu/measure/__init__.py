"""Measurements: a module for each section of `sluice bench gpu`, or a few.

device_limits       copy bandwidth, GEMM rate, launch times: the floors of the others
decode, prefill     steps of the worker's whole loop
isolated_kernels    sections attention, linear and kernels: each kernel on its own
idle                time between steps
ablations           each optimization switched off
trace               kernels of a decode step, from the profiler
startup             from the start of `sluice serve` to the first token
served              workloads over HTTP
transformers_peer   the same workloads through transformers' continuous batching
"""
