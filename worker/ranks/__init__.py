"""Tensor and pipeline parallelism: several processes, the ranks, compute one model together.

worker/model/parts/ says which part each of them has. Rank 0 is the worker as everyone knows it, with the sockets, the
scheduler and the sampler. The others are its child processes, or processes on other hosts. They get the inputs of each
step from it. Ranks with the same layers exchange rows in shared memory or by TCP (worker/kernels/cpu/csrc/ranks), and
ranks with different layers hand them on.

leader              starts the other ranks (worker/follower.py), and tells them what to compute
hosts/              how ranks on several hosts find each other (worker/host_follower.py)
frames              what rank 0 tells the others, and what stages hand on, as bytes
exchange            with whom a rank exchanges rows
part                the decoder of a rank that has a part of each layer
pipeline            the decoder of a rank that has some of the layers
checks              compares the ranks: their residual streams, and at start their weights
metrics             counts ranks that differ
nodes               which processors a rank runs on
"""
