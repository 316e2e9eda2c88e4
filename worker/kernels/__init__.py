"""The operations of a decoder. These modules import nothing else from this project.

An operation `x` is a function in a module of that name. It calls one of three forms, depending on its tensors:
`x_triton` in gpu/ on a GPU, `x` in cpu/bindings.py (the C library) on a CPU, or `x_torch` in the same module, which is
plain PyTorch and defines what x computes.

    operations          all operations as one record: the fast forms, or the forms in plain PyTorch
    norm, rotary        RMS norm and layer norm; rotary embedding
    store_kv            writes K/V into the cache
    qkv_rope_write      norm, rotary and store_kv in one pass, for queries, keys and values
    attention           attention over the paged cache
    linear              matrix products
    library_products    matrix products of many rows by the vendor's library, where it gives the same bits
    experts             the feed-forward network of a mixture of experts
    delta_net           the gated delta rule, with a state instead of K/V
    mamba2              Mamba-2, another layer whose sequences have a state
    short_conv          short convolutions, whose state is their last inputs
    recurrent_state     the state of any recurrent layer, in slots
    recurrent_torch     what recurrent layers have in common in plain PyTorch
    output_gate         the output gate of attention
    activate            the activation of a feed-forward network without a gate
    act_and_mul         the activation of one with a gate
    eight_bit_kv        rows of keys and values in eight bits, with a scale
    quantized_weight    weights of four or eight bits, in groups with a scale
    by_rows             converts large tensors in slices, on all cores
    quantize            eight-bit weights and activations
    sample              chooses the next token of each row
    params              sampling parameters
    split_k             partial sums that the next kernel adds
"""
