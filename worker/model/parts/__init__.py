"""Decides which part of a model one process holds if several processes compute the model together.

share               some heads of every layer (tensor parallelism)
stages              some layers of the model (pipeline parallelism)
part                the stage and the share of each process
"""
