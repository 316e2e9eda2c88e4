"""Stands in for a GPU that is not there: runs worker and bench on fake tensors, and compiles what they would launch.

machine             records what happens on the fake GPU, and mistakes that a real GPU would not forgive
dispatch            runs operations on the host, and computes only shapes for operations on the device
launches            catches Triton's launches and the compilations that they need
cuda                takes the place of torch.cuda while `gpu()` lasts
checkpoint          a checkpoint folder of real shapes that takes no disk space
devices             GPUs that the fake one may be
rehearsals          a worker's start, and the bench's sections, on the fake GPU
compiling           compiles what the fake GPU found to be needed, on all cores
triton_offline      compiles one kernel for a given GPU, and reads the compiled code
compile_job         one process that finds out what is needed and compiles it
precompile          fills a cache for a GPU's machine
compile_table       what each kernel takes on each GPU, as a table
wheels              packages to bring to a machine without a network
packed_cache        a Triton cache that was compiled for another machine
launch_report       launches per layer, and the host's time of a step
"""
