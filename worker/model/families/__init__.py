"""Makes a ModelSpec from config.json. Each model family is a row of data.

family_table        the rows
family_defaults     the defaults of the families' settings
families            makes a ModelSpec from config.json and the family's row
rope_settings       reads the rotary settings of config.json
gemma4_layers       reads the settings in which layers of Gemma 4 differ
spec_bounds         refuses a model whose sizes contradict each other, or are too large for the kernels
"""
