"""Weights of eight bits: one fp32 scale for each output channel, which is a row; symmetric, no zero points.

`int8` keeps seven bits and a sign of every value beside its row's largest; `fp8` is e4m3 (float8_e4m3fn), whose steps
grow with the value, so that small weights beside a large one keep more.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["int8", "fp8"]
FORMATS: Mapping[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROWS = 1024  # at a time: no whole weight is ever in float32
LARGEST: Mapping[Kind, float] = {"int8": 127.0, "fp8": 448.0}


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """weight [N, K] of any float format -> values [N, K] of FORMATS[kind], scale [N] float32.

    A row's largest value becomes the largest of the format; a row of zeros stays one.
    """
    values, most = torch.empty(weight.shape, dtype=FORMATS[kind], device=weight.device), LARGEST[kind]
    scale = torch.empty(len(weight), device=weight.device)
    for part, into, largest in zip(*(whole.split(ROWS) for whole in (weight, values, scale)), strict=True):
        wide = part.float()
        largest.copy_((wide.abs().amax(dim=1) / most).clamp(min=torch.finfo(torch.float32).tiny))
        scaled = (wide / largest[:, None]).clamp(-most, most)
        into.copy_(scaled.round() if kind == "int8" else scaled)
    return values, scale


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values [N, K] times scale ([N], or [N, K]) in float32, rounded once to `dtype`."""
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    for part, into, own in zip(*(whole.split(ROWS) for whole in (values, weight, scale)), strict=True):
        into.copy_(part.float() * (own[:, None] if own.dim() == 1 else own))
    return weight


def linear_quantized_torch(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """What a linear with such a weight means: x [T, K] @ values.T in float32, times scale [N], plus bias [N], rounded
    once to x's dtype -> [T, N]. Activations stay as they are."""
    total = F.linear(x.float(), values.float()) * scale
    return (total if bias is None else total + bias.float()).to(x.dtype)
