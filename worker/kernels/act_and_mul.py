"""The activation of a gated feed-forward network: act(gate) * up.

`clamped_swiglu` is that of gpt-oss: gate and up are clamped to CLAMP, up to both sides, and the result is
gate * sigmoid(1.702 * gate) * (up + 1).
"""

import torch
from torch import Tensor

from worker.kernels.activate import ACTIVATIONS, Activation, activate_torch
from worker.kernels.cpu import bindings
from worker.kernels.gpu.options import NO_OPTIONS, GpuOptions

CLAMP, SWIGLU_ALPHA = 7.0, 1.702


def act_and_mul(x: Tensor, activation: Activation, *, options: GpuOptions = NO_OPTIONS) -> Tensor:
    """Returns act(x[:, :I]) * x[:, I:]. The activation is rounded to x's dtype before the multiplication.

    x [T, 2 * I] is contiguous and holds the gate and up projections side by side. The result is [T, I]. activation: one
    of GATED in activate.py.
    """
    if x.is_cuda:
        from worker.kernels.gpu.act_and_mul import act_and_mul_triton

        return act_and_mul_triton(x, activation, options=options)
    if bindings.available(x.dtype):
        return bindings.act_and_mul(x, ACTIVATIONS.index(activation))
    return act_and_mul_torch(x, activation)


def act_and_mul_torch(x: Tensor, activation: Activation) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    if activation != "clamped_swiglu":
        return activate_torch(gate, activation) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
