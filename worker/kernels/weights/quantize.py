"""Quantizes weights to eight bits: symmetric, with one fp32 scale for each output channel (row) and no zero points.

`int8` stores seven bits and a sign relative to the largest value of the row. `fp8` is e4m3 (float8_e4m3fn), whose steps
grow with the value, so small weights keep more precision if the row also has a large weight.

Activations may be quantized too, dynamically, right before a matrix product. The scale of a token depends only on its
own row, so the token's bits do not depend on other tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["int8", "fp8"]
FORMATS: Mapping[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ROWS_AT_ONCE = 1024  # how many rows are converted at once, so that a whole weight is never in float32
KINDS: Mapping[torch.dtype, Kind] = {format: kind for kind, format in FORMATS.items()}
LARGEST: Mapping[Kind, float] = {"int8": 127.0, "fp8": 448.0}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear layer is quantized. Its text is fp8, int8, fp8-dynamic or int8-dynamic."""

    kind: Kind
    dynamic: bool = False  # if true, inputs are quantized, too, with a scale for each token

    @classmethod
    def of(cls, name: str) -> "Scheme":
        kind: Kind = "fp8" if name.startswith("fp8") else "int8"
        return cls(kind, name.endswith("-dynamic"))

    def __str__(self) -> str:
        return self.kind + ("-dynamic" if self.dynamic else "")


def divided(x: Tensor, divisor: float) -> Tensor:
    """Returns x / divisor, with the same bits on every device.

    PyTorch's CUDA kernel would multiply by the reciprocal of a Python number, which rounds twice. The scale then
    differs in its last bit, and numbers halfway between two codes are rounded to the other code.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Quantizes a weight [N, K] of any float dtype to values [N, K] of FORMATS[kind] and a scale [N] float32.

    The largest value of a row maps to the largest value of the format. A row of zeros stays zeros.
    """
    values, largest_value = torch.empty(weight.shape, dtype=FORMATS[kind], device=weight.device), LARGEST[kind]
    scale = torch.empty(len(weight), device=weight.device)
    for part, target, largest in zip(*(whole.split(ROWS_AT_ONCE) for whole in (weight, values, scale)), strict=True):
        x_fp32 = part.float()
        largest.copy_(divided(x_fp32.abs().amax(dim=1), largest_value).clamp(min=torch.finfo(torch.float32).tiny))
        scaled = (x_fp32 / largest[:, None]).clamp(-largest_value, largest_value)
        target.copy_(scaled.round() if kind == "int8" else scaled)
    return values, scale


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns values [N, K] times scale ([N], or [N, K]), computed in float32 and rounded once to `dtype`."""
    weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    for part, target, row_scale in zip(*(whole.split(ROWS_AT_ONCE) for whole in (values, weight, scale)), strict=True):
        target.copy_(part.float() * (row_scale[:, None] if row_scale.dim() == 1 else row_scale))
    return weight


def linear_quantized_torch(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, *, dynamic: bool = False
) -> Tensor:
    """Defines `linear` with a quantized weight: returns x [T, K] @ values.T * scale [N] + bias [N], [T, N].

    Computes in float32 and rounds once to x's dtype. dynamic: if true, x is quantized first, and each row of the
    product is multiplied by its token's scale before the bias is added.
    """
    tokens, token_scale = quantize_tokens(x, values.dtype) if dynamic else (x, None)
    total = F.linear(tokens.float(), values.float()) * scale
    total = total if token_scale is None else total * token_scale[:, None]
    return (total if bias is None else total + bias.float()).to(x.dtype)


def quantize_tokens(x: Tensor, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes x [T, K] of any float dtype to values [T, K] of dtype `format` and a scale [T] float32.

    Rounds x * (1 / scale) once. If one value of a row is not finite, the whole row becomes not finite.
    """
    largest_value, x_fp32 = float(LARGEST[KINDS[format]]), x.float()
    scale = divided(x_fp32.abs().amax(dim=1), largest_value).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (x_fp32 * (1 / scale)[:, None]).clamp(-largest_value, largest_value)
    return (scaled.round() if format == torch.int8 else scaled).to(format), scale
