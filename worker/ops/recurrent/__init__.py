"""Recurrent layers (gated delta rule, Mamba-2, short convolution): chooses which form runs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from worker.ops.choose import choosing
from worker.ops.recurrent import native
from worker.ops.recurrent.reference import delta_net_torch, mamba2_torch, short_conv_torch


def _has_shape(supports: Callable[..., bool]) -> Callable[..., bool]:
    return lambda projected, _, weights, shape, *rest: supports(projected.dtype, shape)


def _supports_short_conv(projected: Tensor, weight: Tensor, *_: Any) -> bool:
    return native.supports_short_conv(projected.dtype, len(weight))


delta_net = choosing(
    delta_net_torch,
    "worker.ops.recurrent.triton.delta_net_triton",
    native.delta_net,
    _has_shape(native.supports_delta_net),
)
mamba2 = choosing(
    mamba2_torch, "worker.ops.recurrent.triton.mamba2_triton", native.mamba2, _has_shape(native.supports_mamba2)
)
short_conv = choosing(
    short_conv_torch, "worker.ops.recurrent.triton.short_conv_triton", native.short_conv, _supports_short_conv
)
