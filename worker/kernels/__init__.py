"""The operations of a decoder. These modules import nothing else from this project.

An operation `x` has up to three forms. `x_torch` in the module of its name is plain PyTorch, and defines what x
computes. `x_triton` in gpu/ runs on a GPU, `x` in cpu/bindings.py calls the C library on a CPU. The forms do not know
of one another: forms.py chooses.

    operations          all operations as one record: the fast forms, or the forms in plain PyTorch
    forms               chooses the form of each operation for its tensors
    rowwise/            operations that compute each row alone: what they compute, in plain PyTorch
    attention           attention over the paged cache
    linear              matrix products
    library_products    matrix products of many rows by the vendor's library, where it gives the same bits
    experts             the feed-forward network of a mixture of experts
    recurrent/          layers whose sequences have a state instead of K/V: what they compute, in plain PyTorch
    weights/            numbers in few bits: weights, activations, keys and values
    sample              chooses the next token of each row
    params              sampling parameters
    split_k             partial sums that the next kernel adds
"""
