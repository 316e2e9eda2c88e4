"""Ranks on GPUs: each has a GPU of its own, and they exchange columns by torch.distributed.

The same code runs on CPUs in the tests, with gloo in place of NCCL.

devices             which GPU a rank has; refuses more ranks than GPUs
lanes               the group of the ranks that share layers, and what they gather
operations          the operations of a decoder that gather columns around its products
part                the decoder of a rank that has a part of each layer
"""
