"""Models, steps and tools that several measurements share.

harness             the worker's loop without sockets
weights             random weights of any spec
expert_weights      random experts of a layer
checkpoint          a checkpoint folder with random weights
step_kinds          kinds of decode steps in which one sequence differs from the others
steps               builds steps without a scheduler
unfused             the decoder's operations with some fused kernels replaced by separate ones
profiler            records kernels and their times with torch's profiler
roofline            the minimum of bytes and operations that a step needs
"""
