"""What the measurements are built from.

harness             the worker's loop without sockets
weights             random weights of any spec
checkpoint          a checkpoint folder with random weights
steps               hand-made steps, without a scheduler
unfused             the decoder's operations with fusions taken apart
profiler            spans of torch's profiler
roofline            bytes and operations that a step needs at least
"""
