"""Attention over the paged cache.

attention           chooses among the kernels below
prefill_attention   the kernel in which one program attends to all keys of a tile of rows
overlapped_attention: another loop over keys for this kernel, in which softmax and matrix products overlap
split_attention     the kernels in which several programs share the keys of a row
key_splits          where attention splits the keys of a row
work_items          lists the work of attention's programs on the device
online_softmax      the partial softmax that attention computes for blocks of keys and merges
"""
