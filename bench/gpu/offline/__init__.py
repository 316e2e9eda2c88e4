"""A fake GPU for machines without one: runs worker and bench on fake tensors, and compiles the kernels they launch."""
