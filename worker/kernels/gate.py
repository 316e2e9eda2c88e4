"""The gated feed-forward's middle: activation of one half times the other half."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from worker.kernels import native

Activation = Literal["silu", "gelu_tanh"]


def gate(x: Tensor, activation: Activation) -> Tensor:
    """act(x[:, :I]) * x[:, I:], the activation rounded to x's dtype before it multiplies.

    x [T, 2 * I] contiguous: gate and up projections side by side. Returns [T, I].
    """
    if x.is_cuda:
        from worker.kernels.gate_triton import gate_triton

        return gate_triton(x, activation)
    if native.available(x.dtype):
        return native.gate(x, activation)
    return gate_torch(x, activation)


def gate_torch(x: Tensor, activation: Activation) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (F.silu(left) if activation == "silu" else F.gelu(left, approximate="tanh")) * right
