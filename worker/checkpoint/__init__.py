"""Finds and reads the tensors of a checkpoint."""
