"""What one process has of a model that several compute together.

share               some heads of every layer (tensor parallelism)
stages              some layers of the model (pipeline parallelism)
part                both, for each process
"""
