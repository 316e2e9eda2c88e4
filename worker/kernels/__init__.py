"""The operations of a decoder. They import nothing else from this project.

An operation `x` is a function in a module of that name. It calls one of three forms, depending on its tensors:
`x_torch` beside it, plain PyTorch, which defines what x means; `x_triton` in gpu/, on a GPU; `x` in cpu/bindings.py,
the C library, on a CPU.

    operations          all operations as one record: the fast forms, or the ones in plain PyTorch
    norm, rotary        RMS norm; rotary embedding
    store_kv            writes K/V into the cache
    qkv_rope_write      those three in one pass, for queries, keys and values
    attention           attention over the paged cache
    linear              matrix products
    act_and_mul         the activation of the feed-forward network
    quantize            eight-bit weights and activations
    sample, params      chooses the next token of each row; sampling parameters
    split_k             partial sums that the next kernel adds
"""
