"""Attention over the paged cache, and what its kernels share.

attention           chooses among the kernels below
prefill_attention   the kernel of attention in which a program attends to all keys of a tile of rows
overlapped_attention: its loop over keys, which computes the softmax of a block during the product for the next block
split_attention     the kernels of attention in which several programs share the keys of a row
key_splits          where attention splits the keys of a row
work_items          lists the work of attention's programs on the device
online_softmax      the partial softmax that attention computes for blocks of keys and merges
"""
