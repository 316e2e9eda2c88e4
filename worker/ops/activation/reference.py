"""The activation of a gated feed-forward network: act(gate) * up.

`clamped_swiglu` is the activation of gpt-oss. It limits `gate` to at most CLAMP, and `up` to -CLAMP .. CLAMP. The
result is gate * sigmoid(1.702 * gate) * (up + 1).
"""

import torch
from torch import Tensor

from worker.kernels.rowwise.activate import Activation, activate_torch

CLAMP, SWIGLU_ALPHA = 7.0, 1.702


def act_and_mul_torch(x: Tensor, activation: Activation) -> Tensor:
    """Returns act(x[:, :I]) * x[:, I:]. The activation is rounded to x's dtype before the multiplication.

    x [T, 2 * I] is contiguous and holds the gate and up projections side by side. The result is [T, I].
    activation: one of GATED in activate.py
    """
    gate, up = x.chunk(2, dim=-1)
    if activation != "clamped_swiglu":
        return activate_torch(gate, activation) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
