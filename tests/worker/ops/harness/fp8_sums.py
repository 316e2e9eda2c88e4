"""Adds products of fp8 numbers as the tensor cores of an H200 are known to add them."""

import torch
from torch import Tensor

BLOCK_K = 128  # how many products our kernels add in the tensor core before float32 takes over the sum
STEP, BITS = 32, 13  # products added at once, and the bits below the largest of them that are kept


def fp8_sums(x: Tensor, weight: Tensor, stage: int) -> Tensor:
    """Returns x [T, K] @ weight [N, K].T, float32, for values in float8_e4m3fn.

    The tensor core adds STEP products to its sum at once. It keeps BITS bits below the largest of these numbers, and
    cuts off the others. After `stage` products, its sum is added in float32, and it starts from zero.
    """
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], stage):
        held = torch.zeros(total.shape, dtype=torch.float64)
        for at in range(begin, min(begin + stage, x.shape[1]), STEP):
            products = x[:, None, at : at + STEP].double() * weight[None, :, at : at + STEP].double()
            numbers = torch.cat((products, held[..., None]), dim=-1)
            exponent = torch.frexp(numbers.abs().amax(dim=-1, keepdim=True)).exponent
            unit = torch.exp2((exponent - BITS).double())
            held = ((numbers / unit).trunc() * unit).sum(dim=-1)
        total += held.float()
    return total
