"""Tensor and pipeline parallelism: several processes, the ranks, compute one model together."""
