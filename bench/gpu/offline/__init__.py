"""A GPU that is not there: runs the worker and the bench on fake tensors, and compiles what they would launch.

machine             what happened on the fake GPU, and what a real one would not forgive
dispatch            runs the host's operations, and computes only shapes of the device's
launches            catches Triton's launches and the compilations that they need
cuda                takes the place of torch.cuda while `gpu()` lasts
checkpoint          a checkpoint folder of real shapes that takes no disk space
compiling           compiles what the fake GPU found to be needed, on all cores
triton_offline      compiles one kernel for a given GPU, and reads the compiled code
packed_cache        a Triton cache that was compiled for another machine
launch_report       launches per layer, and the host's time of a step
"""
