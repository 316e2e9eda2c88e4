"""LoRA adapters as files: which adapters the flags name, and what their files hold. Knows no model and no tensors.

named               adapters by name and folder, as flags and routes name them, and which folders may be read
files               reads the two files of a folder of PEFT, or a GGUF file, and hashes them
low_rank            reads PEFT folders: for each module a product of two matrices, and its scale
patterns            finds the modules with a rank or scale of their own in a PEFT folder
gguf                reads GGUF adapters
"""
