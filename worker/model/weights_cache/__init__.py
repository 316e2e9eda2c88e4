"""Keeps the packed weights on disk.

weights_cache       reads a model's packed weights at the start, or writes them after they were packed
tensor_file         the file format
"""
