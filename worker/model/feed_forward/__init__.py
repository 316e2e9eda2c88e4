"""Feed-forward networks: the part of a layer that computes each row alone. A kind is a file, which knows all about it.

kinds           what a kind is, and the kinds by name
dense           the MLP
experts         a mixture of experts, with a shared expert or beside an MLP
expert_modules  the names of its modules in a checkpoint

The kernels are in worker/kernels.
"""
