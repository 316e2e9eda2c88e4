"""The operations of a decoder. The modules of this folder import nothing from other folders of this project.

An operation `x` has up to three forms. `x_torch` in the module of its name is plain PyTorch, and defines what `x`
computes. `x_triton` in gpu/ runs on a GPU. `x` in cpu/bindings.py calls the C library on a CPU. No form knows the other
forms: forms.py chooses.

    operations          all operations as one record: the fast forms, or the forms in plain PyTorch
    forms               chooses the form of each operation for its tensors
    rowwise/            the operations that compute each row alone, in plain PyTorch
    attention           attention over the paged cache
    linear              matrix products
    library_products    matrix products of many rows by the vendor's library, where it gives the same bits
    experts             the feed-forward network of a mixture of experts
    recurrent/          the operations of layers with a recurrent state instead of K/V, in plain PyTorch
    weights/            quantization: of weights, of activations, of keys and values
    sample              chooses the next token of each row
    params              sampling parameters
    split_k             partial sums that the next kernel adds
"""
