"""Recurrent layers (gated delta rule, Mamba-2, short convolution): chooses which form runs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from worker.ops.choose import choosing
from worker.ops.recurrent import native as delta_net_c
from worker.ops.recurrent import native as mamba2_c
from worker.ops.recurrent import native as short_conv_c
from worker.ops.recurrent.mamba2 import mamba2_torch, short_conv_torch
from worker.ops.recurrent.reference import delta_net_torch


def _has_shape(supports: Callable[..., bool]) -> Callable[..., bool]:
    return lambda projected, _, weights, shape, *rest: supports(projected.dtype, shape)


def _supports_short_conv(projected: Tensor, weight: Tensor, *_: Any) -> bool:
    return short_conv_c.supports_short_conv(projected.dtype, len(weight))


delta_net = choosing(
    delta_net_torch,
    "worker.ops.recurrent.triton.delta_net_triton",
    delta_net_c.delta_net,
    _has_shape(delta_net_c.supports_delta_net),
)
mamba2 = choosing(
    mamba2_torch, "worker.ops.recurrent.triton.mamba2_triton", mamba2_c.mamba2, _has_shape(mamba2_c.supports_mamba2)
)
short_conv = choosing(
    short_conv_torch, "worker.ops.recurrent.triton.short_conv_triton", short_conv_c.short_conv, _supports_short_conv
)
