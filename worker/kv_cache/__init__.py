"""The pool of K/V pages.

pages               which page belongs to which sequence (plain integers)
prefix_cache        which pages already hold the beginning of a prompt (plain integers)
tensors             the tensors
prefault            makes the operating system provide memory before its first use
sizing              decides how many pages there are
gpu_memory          reads the memory of a GPU
"""
