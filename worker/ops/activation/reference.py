"""The activation of a gated feed-forward network: act(gate) * up.

`clamped_swiglu` is the activation of gpt-oss. It limits `gate` to at most CLAMP, and `up` to -CLAMP .. CLAMP. The
result is gate * sigmoid(1.702 * gate) * (up + 1).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.spec import ACTIVATIONS, Activation

CLAMP, SWIGLU_ALPHA = 7.0, 1.702


def act_and_mul_torch(x: Tensor, activation: Activation) -> Tensor:
    """Returns act(x[:, :I]) * x[:, I:]. The activation is rounded to x's dtype before the multiplication.

    x [T, 2 * I] is contiguous and holds the gate and up projections side by side. The result is [T, I].
    activation: one of GATED in triton.py
    """
    gate, up = x.chunk(2, dim=-1)
    if activation != "clamped_swiglu":
        return activate_torch(gate, activation) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)


# The activation of a feed-forward network without a gate. triton.py has the activation of gated networks.
#
# `relu2` is the square of max(x, 0). `xielu` (arXiv 2411.13010) has four parameters, alpha_p, alpha_n, beta and eps:
#
# alpha_p * x * x + beta * x  where x > 0, and else  (expm1(min(x, eps)) - x) * alpha_n + beta * x

GATED = (*ACTIVATIONS[:4], "gelu")  # the activations that act_and_mul computes
PLAIN = (*ACTIVATIONS[:3], "xielu", "gelu")  # the activations that activate computes


def activate_torch(x: Tensor, activation: Activation, parameters: Tensor | None = None) -> Tensor:
    """Returns act(x) for x [T, I] contiguous, computed in fp32 and rounded once. activation: one of PLAIN.

    parameters [4] float32: the parameters of `xielu`.
    """
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
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


# The output gate of attention: the output of attention is multiplied by the sigmoid of a linear projection of
# attention's input.


def output_gate_torch(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate). The sigmoid is rounded to x's dtype before the multiplication.

    x, gate [T, N] contiguous, with the same dtype.
    """
    return x * gate.sigmoid()
