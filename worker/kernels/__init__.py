"""What a decoder computes with. Imports nothing of ours.

An operation `x` is a function in a file of its own, which looks at its tensors and calls one of three forms:
`x_torch` beside it, plain PyTorch, which says what x means; `x_triton`, in x_triton.py, on a GPU; `native.x`, the C
library, on a CPU.

    operations                  all of them as one record: the fast forms, or those in plain PyTorch
    norm, rotary, write         RMS norm; rotary embedding; K/V into the cache
    heads                       those three in one pass, for queries, keys and values
    attention                   over the paged cache
    linear, gate                matrix products; the feed-forward's activation
    quantize                    weights and activations of eight bits
    sample, params              the next token of each row; what a row asks for
    terms                       partial sums that the next kernel adds

Triton's:

    norm_triton, rotary_triton, write_triton, heads_triton, attention_triton, linear_triton, gate_triton,
    quantize_triton, sample_triton, terms_triton
    splits_triton               where attention cuts a row's keys
    tiles                       where products cut K, and which tiles they use
    weigh_triton, cut_triton    what sampling knows of a row; where top-k and top-p cut it

The C library's (native/*.c):

    build, library, native      compiling it; which functions run here; its functions on tensors
    stack                       all layers of a decoder in one call
"""
