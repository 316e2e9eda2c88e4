"""Tensor and pipeline parallelism: several processes, the ranks, compute one model together.

worker/models/sharding/ defines the part of the model that each rank has. Rank 0 is the worker process with the sockets,
the scheduler and the sampler. The other ranks are its child processes, or processes on other hosts. Rank 0 sends them
the inputs of each step. Ranks with the same layers exchange rows in shared memory or over TCP (worker/ops/csrc/ranks),
and on GPUs by NCCL. Ranks with different layers pass rows on from stage to stage, and compute different steps at the
same time.

leader              starts the other ranks (worker/follower.py), and sends them orders
gpu/                lets ranks on GPUs exchange columns
hosts/              lets ranks on several hosts find each other (worker/host_follower.py)
inbox               receives frames in a thread, so that no sender waits for a rank that computes
frames              the messages between rank 0 and the other ranks, and the rows that stages pass on, as bytes
exchange            the ranks with which a rank exchanges rows
part                the decoder of a rank that has a part of each layer
adapters            LoRA adapters: each rank keeps its part of them
pipeline            the decoder of a rank that has some of the layers
layer_vectors       per-layer embeddings, which stages hand on
taps                outputs of inner layers for a drafter, which stages hand on
staged_model        the model in stages as rank 0 sees it, with several steps in flight
expert_loads        counts how many rows choose each expert, in memory that all stages map
checks              compares the ranks: their residual streams, and at start their weights
metrics             counts ranks that had wrong numbers
nodes               keeps a rank on the processors of one NUMA node
"""
