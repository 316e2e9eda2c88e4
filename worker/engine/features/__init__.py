"""Parts that only some engines have. They are loaded in addition to the model.

drafters            finds the model that --speculative-config names, and gives it to an engine
ranks_on_gpu        checks the GPUs of several ranks, and sizes the K/V pool by the smallest
"""
