"""Makes a spec from config.json: the families as rows of data.

family_table

families, rope_settings     make a spec from config.json
spec_bounds         refuses a model whose sizes contradict each other, or that the kernels cannot hold
family_defaults     the defaults of their settings
gemma4_layers       what differs between the layers of Gemma 4
"""
