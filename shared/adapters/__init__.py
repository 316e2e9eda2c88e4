"""LoRA adapters as files: which ones the flags name, and what a folder of PEFT holds. Knows no model and no tensors.

named               adapters by name and folder, as flags and routes name them, and which folders may be read
files               reads the two files of a folder, and hashes them
low_rank            what the files say: for each module a product of two matrices, and its scale
"""
