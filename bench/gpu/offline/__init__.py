"""A fake GPU for machines without one: runs worker and bench on fake tensors, and compiles the kernels they launch.

machine             records what happens on the fake GPU, and finds what would be an error on a real GPU
dispatch            runs operations on the host, and computes only shapes for operations on the device
launches            catches Triton's launches and the compilations that they need
cuda                replaces torch.cuda inside `with gpu()`
checkpoint          a checkpoint folder of real shapes that takes no disk space
devices             real GPUs that the fake GPU can stand for
rehearsals          a worker's start, and the bench's sections, on the fake GPU
compiling           compiles the kernels that a run on the fake GPU needed, on all cores
triton_offline      compiles one kernel for a given GPU, and reads the compiled code
compile_job         one process that finds the needed kernels and compiles them
precompile          fills a Triton cache for a machine with a GPU
compile_table       registers and shared memory of each kernel on each GPU, as a table
wheels              packages to bring to a machine without a network
packed_cache        a Triton cache that was compiled for another machine
launch_report       launches per layer, and the host's time of a step
"""
