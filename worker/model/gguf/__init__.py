"""Reads weights from GGUF files, under the names of Hugging Face checkpoints.

names       translates the names of tensors
tower_names translates the names of a vision tower's tensors
layout      undoes other changes that llama.cpp's converter has made to a tensor
tensors     reads the tensors of the files
blocks      unpacks block formats: their bytes become codes, scales and minimums
method      finds the weights that are in a block format, and reads them
"""
