"""The demo model: a Llama of four million parameters.

model/              the checkpoint
training/           the scripts that made it
"""
