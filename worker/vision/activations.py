"""The activations of towers and connectors. The activations of text models are kernels; the exact GELU is torch's."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu

from worker.operations import Operations
from worker.ops.linear.packed import PackedLinear
from worker.spec import Activation

VisionActivation = Activation | Literal["gelu"]
# Name in configs → activation. Each tower takes all of them, as its class in transformers does.
VISION_ACTIVATIONS: Mapping[str, VisionActivation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "gelu": "gelu"}
# Torch computes at most this many elements in one thread. It divides more elements among threads, and rounds the last
# elements of each thread's part differently.
FEW_ELEMENTS = 1 << 14


def exact_gelu(x: Tensor) -> Tensor:
    """Returns x * Φ(x) for x [T, I]. A row's bits depend on neither threads nor other rows."""
    few = max(1, FEW_ELEMENTS // x.shape[1])
    return torch.cat([gelu(x[first : first + few]) for first in range(0, len(x), few)])


def activated_linear(x: Tensor, up: PackedLinear, activation: VisionActivation, do: Operations) -> Tensor:
    """Returns act(x @ up), [T, I]."""
    wide = do.linear(x, up)
    return exact_gelu(wide) if activation == "gelu" else do.activate(wide, activation)


def gated_linear(x: Tensor, gate_up: PackedLinear, activation: VisionActivation, do: Operations) -> Tensor:
    """Returns act(x @ gate) * (x @ up), [T, I]. gate_up: both linears side by side, H → 2 I"""
    return gated(do.linear(x, gate_up), "gelu", do) if activation == "gelu" else do.gated_linear(x, gate_up, activation)


def gated(wide: Tensor, activation: VisionActivation, do: Operations) -> Tensor:
    """Returns act(wide[:, :I]) * wide[:, I:], [T, I]. wide [T, 2 * I]: gate and up, contiguous"""
    if activation != "gelu":
        return do.act_and_mul(wide, activation)
    gate, up = wide.chunk(2, dim=1)
    return exact_gelu(gate.contiguous()) * up
