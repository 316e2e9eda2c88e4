"""Feed-forward networks: the part of a layer that computes each row alone. Each kind of network is one file.

kinds           the functions that a kind must have, and the kinds by name
dense           the MLP
experts         a mixture of experts, with a shared expert or beside an MLP
expert_modules  the names of the experts' modules in a checkpoint

The kernels are in worker/kernels.
"""
