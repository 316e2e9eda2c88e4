"""Models, steps and tools that several measurements share.

harness             the worker's loop without sockets
weights             random weights of any spec
expert_weights      random experts of a layer
checkpoint          a checkpoint folder with random weights
step_kinds          decodes in which one sequence is something else
steps               hand-made steps, without a scheduler
unfused             the decoder's operations with some fused kernels replaced by separate ones
profiler            spans of torch's profiler
roofline            the minimum of bytes and operations that a step needs
"""
