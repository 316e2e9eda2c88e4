"""Weights of eight bits: one fp32 scale for each output channel, which is a row; symmetric, no zero points.

`int8` keeps seven bits and a sign of every value beside its row's largest; `fp8` is e4m3 (float8_e4m3fn), whose steps
grow with the value, so that small weights beside a large one keep more.

Activations may become such numbers, too, on their way into a product: dynamically, each token with a scale that follows
from its own row and nothing else, so that its bits depend on no other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["int8", "fp8"]
FORMATS: Mapping[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROWS = 1024  # of weights at a time: no whole weight is ever in float32
KINDS: Mapping[torch.dtype, Kind] = {format: kind for kind, format in FORMATS.items()}
LARGEST: Mapping[Kind, float] = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a linear is in memory. Called fp8, int8, fp8-dynamic, int8-dynamic."""

    kind: Kind
    dynamic: bool = False  # its inputs become of that format, too, with a scale for each token

    @classmethod
    def of(cls, name: str) -> "Scheme":
        kind: Kind = "fp8" if name.startswith("fp8") else "int8"
        return cls(kind, name.endswith("-dynamic"))

    def __str__(self) -> str:
        return self.kind + ("-dynamic" if self.dynamic else "")


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


def linear_quantized_torch(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, *, dynamic: bool = False
) -> Tensor:
    """What a linear with such a weight means: x [T, K] @ values.T in float32, times scale [N], plus bias [N], rounded
    once to x's dtype -> [T, N].

    If `dynamic`, x is quantized first, and each row's product multiplied by its scale before the bias is added.
    """
    tokens, token_scale = quantize_tokens(x, values.dtype) if dynamic else (x, None)
    total = F.linear(tokens.float(), values.float()) * scale
    total = total if token_scale is None else total * token_scale[:, None]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def quantize_tokens(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, K] of any float format -> values [T, K] of `format`, scale [T] float32.

    Rounded once, from x times 1 / scale. What is not finite makes its whole row so.
    """
    most, wide = float(LARGEST[KINDS[format]]), x.float()
    scale = (wide.abs().amax(dim=1) / most).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (wide * (1 / scale)[:, None]).clamp(-most, most)
    return (scaled.round() if format == torch.int8 else scaled).to(format), scale
