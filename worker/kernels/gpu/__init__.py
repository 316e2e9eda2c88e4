"""Triton kernels: the GPU forms of the operations. The module of an operation has its name.

attention/          attention over the paged cache, and what its kernels share
products/           matrix products with plain and with quantized weights
experts/            the feed-forward network of a mixture of experts
rowwise/            operations that compute each row alone
recurrent/          layers whose sequences have a state
sampling/           the choice of the next token
launch/             ways to launch kernels
"""
