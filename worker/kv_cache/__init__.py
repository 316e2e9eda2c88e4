"""The pool of K/V pages.

window              computes which positions of a sequence a sliding window still needs (plain integers)
pages               tracks which page is free, cached or owned (plain integers)
prefix_cache        finds the pages that already hold the beginning of a prompt (plain integers)
slots               computes how many slots for recurrent states there are (plain integers)
groups              divides the layers into groups that share a page table
tensors             the tensors of the K/V cache and of recurrent states
prefault            makes the operating system provide memory before its first use
sizing              decides how many pages there are
gpu_memory          reads the memory of a GPU
host_memory         checks that a model fits in this machine's memory
"""
