"""The activation of a gated feed-forward network: act(gate) * up."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from worker.kernels.cpu import bindings

Activation = Literal["silu", "gelu_tanh"]


def act_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Returns act(x[:, :I]) * x[:, I:]. The activation is rounded to x's dtype before the multiplication.

    x [T, 2 * I] is contiguous and holds the gate and up projections side by side. The result is [T, I].
    """
    if x.is_cuda:
        from worker.kernels.gpu.act_and_mul import act_and_mul_triton

        return act_and_mul_triton(x, activation)
    if bindings.available(x.dtype):
        return bindings.act_and_mul(x, activation)
    return act_and_mul_torch(x, activation)


def act_and_mul_torch(x: Tensor, activation: Activation) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
