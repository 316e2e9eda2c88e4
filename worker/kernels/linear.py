"""Matrix product with a weight that is prepared once and read every step.

`invariant` asks that a row's result never depends on the other rows: library GEMMs choose their K order by the row
count, so it needs a product with fixed tiles.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight as `linear` wants it."""

    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    invariant: bool
    native: object | None = None  # the CPU library's own copy, where there is one


def pack(weight: Tensor, bias: Tensor | None = None, *, invariant: bool) -> PackedLinear:
    """Prepare weight [N, K] (and bias [N]) on the device it lives on."""
    return PackedLinear(weight, bias, invariant)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """x [T, K] @ weight.T + bias -> [T, N], in x's dtype."""
    if x.is_cuda and packed.invariant:
        from worker.kernels.linear_triton import linear_triton

        return linear_triton(x, packed.weight, packed.bias)
    return linear_torch(x, packed.weight, packed.bias)


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)
