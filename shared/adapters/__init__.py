"""LoRA adapters as files: which ones the flags name, and what their files hold. Knows no model and no tensors.

named               adapters by name and folder, as flags and routes name them, and which folders may be read
files               reads the two files of a folder of PEFT, or a GGUF file, and hashes them
low_rank            what a folder says: for each module a product of two matrices, and its scale
patterns            which modules such a folder gives another rank or scale
gguf                what a GGUF file says
"""
