"""Ways to launch kernels.

dependent_launch    starts a kernel before the previous kernel has ended
options             ways to launch kernels that are off by default
compiled            whether kernels are compiled, or run by Triton's interpreter
"""
