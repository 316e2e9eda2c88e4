"""Triton kernels: the GPU forms of the operations. A module has the name of its operation.

attention/          attention over the paged cache
products/           matrix products with plain and with quantized weights
experts/            the feed-forward network of a mixture of experts
rowwise/            operations that compute each row alone
recurrent/          layers with a recurrent state
sampling/           the choice of the next token
launch/             ways to launch kernels
"""
