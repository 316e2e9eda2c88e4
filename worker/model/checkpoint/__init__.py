"""Finds and reads the tensors of a checkpoint.

checkpoint          finds a checkpoint and reads its tensors by name
stacked_tensors     cuts a tensor of all experts into one for each
staging             reads files ahead into device memory
stored_weight       what a checkpoint must offer: tensors by name, and how each weight is stored
content_hash        the hashes of the files of weights
stacked_linear      linears of a checkpoint that are one in memory
language_model      finds the language model in a checkpoint that has others beside it
expected_tensors    checks a checkpoint's tensors before any is read
"""
