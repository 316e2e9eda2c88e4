"""Keeps the packed weights on disk.

weights_cache, tensor_file  keep the packed weights on disk
"""
