"""The part of a model that one process has if several processes compute the model together.

share               some heads of every layer (tensor parallelism)
stages              some layers of the model (pipeline parallelism)
part                both, for each process
"""
