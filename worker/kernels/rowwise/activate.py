"""The activation of a feed-forward network without a gate. act_and_mul.py has the activation of gated networks.

`relu2` is the square of max(x, 0). `xielu` (arXiv 2411.13010) has four parameters, alpha_p, alpha_n, beta and eps:

    alpha_p * x * x + beta * x  where x > 0, and else  (expm1(min(x, eps)) - x) * alpha_n + beta * x
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu", "xielu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # the C library knows activations by these positions
GATED = ACTIVATIONS[:4]  # the activations that act_and_mul computes
PLAIN = (*ACTIVATIONS[:3], "xielu")  # the activations that activate computes


def activate_torch(x: Tensor, activation: Activation, parameters: Tensor | None = None) -> Tensor:
    """Returns act(x) for x [T, I] contiguous, computed in fp32 and rounded once. activation: one of PLAIN.

    parameters [4] float32: the parameters of `xielu`.
    """
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu2":
            return F.relu(x.float()).square().to(x.dtype)
        case "xielu":
            assert parameters is not None
            return _xielu(x.float(), *parameters).to(x.dtype)
        case "clamped_swiglu":
            raise AssertionError("it has a gate")


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    negative = (torch.expm1(x.minimum(eps)) - x) * alpha_n
    return torch.where(x > 0, alpha_p * x * x, negative) + beta * x
