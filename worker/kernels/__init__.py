"""The operations that a decoder is made of. They import nothing else of this project.

An operation `x` is a function in a module of that name. It looks at its tensors and calls one of three forms: `x_torch`
beside it, plain PyTorch, which defines what x means; `x_triton` in gpu/, on a GPU; `x` in cpu/bindings.py, the C
library, on a CPU.

    operations          all operations as one record: the fast forms, or the ones in plain PyTorch
    norm, rotary        RMS norm; rotary embedding
    store_kv            writes K/V into the cache
    qkv_rope_write      those three in one pass, for queries, keys and values
    attention           attention over the paged cache
    linear              matrix products
    act_and_mul         the activation of the feed-forward network
    quantize            eight-bit weights and activations
    sample, params      the next token of each row; what a row asks for
    split_k             partial sums that the next kernel adds
"""
