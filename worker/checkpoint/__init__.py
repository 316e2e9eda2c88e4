"""Finds and reads the tensors of a checkpoint.

checkpoint          finds a checkpoint and reads its tensors by name
stacked_tensors     cuts a tensor of all experts into one tensor for each expert
staging             reads files ahead into device memory
stored_weight       what a checkpoint must offer: tensors by name, and how each weight is stored
content_hash        hashes the weight files
stacked_linear      linears of a checkpoint that are one linear in memory
language_model      finds the language model in a checkpoint that also has encoders or drafters
expected_tensors    checks a checkpoint's tensors before any of them is read
"""
