"""Weights from GGUF files, under the names that Hugging Face gives them.

names       which tensor of a file is which tensor of a Hugging Face checkpoint
tower_names the names of a vision tower's tensors
layout      what else the converter has changed in a tensor, and how that is undone
tensors     reads the tensors of the mapped files
blocks      the block formats: how their bytes become codes, scales and minimums
method      which weights are in a block format, and reads them
"""
