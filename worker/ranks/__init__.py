"""Tensor parallelism: several processes, the ranks, compute one model together.

worker/model/share.py defines the part of the model that each rank has. Rank 0 is the worker process with the sockets,
the scheduler and the sampler. The other ranks are its child processes, or processes on other hosts. Rank 0 sends them
the inputs of each step, and all ranks exchange rows in shared memory or over TCP (worker/kernels/cpu/csrc/ranks).

leader              starts the other ranks (worker/follower.py), and sends them orders
hosts/              lets ranks on several hosts find each other (worker/host_follower.py)
frames              the messages between rank 0 and the other ranks, as bytes
part                the decoder of one rank
checks              compares the ranks: their residual streams, and at start their weights
metrics             counts ranks that had wrong numbers
nodes               keeps a rank on the processors of one NUMA node
"""
