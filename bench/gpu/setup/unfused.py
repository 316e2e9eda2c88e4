"""Replaces fused operations of the decoder by separate kernels that give the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from worker.operations import FAST, Operations
from worker.ops.activation import act_and_mul
from worker.ops.linear import linear
from worker.ops.linear.packed import PackedLinear
from worker.ops.norm import add_rms_norm, rms_norm
from worker.ops.norm.reference import sum_split_k
from worker.ops.rope import qkv_rope_write_unfused
from worker.spec import Activation

GATED_LINEAR = "gate inside its product"
SPLIT_K = "parts of products added by the next kernel"
X_NORM = "norm after attention and feed-forward in the next one"
QKV_ROPE_WRITE = "norm of heads, rotary and K/V write in one"


def _gated_linear(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
    return act_and_mul(linear(x, packed), activation)


def _linear(x: Tensor, packed: PackedLinear, *, fp32_out: bool = False, split_k: bool = False) -> Tensor:
    return linear(x, packed, fp32_out=fp32_out)


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: bool = False,
    x_norm: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    if x_norm is not None:
        x = rms_norm(sum_split_k(x, residual.ndim, residual.dtype), x_norm, eps, offset=offset)
    return add_rms_norm(x, residual, weight, eps, offset=offset, scale=scale)


UNFUSED: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    QKV_ROPE_WRITE: {"qkv_rope_write": qkv_rope_write_unfused},
    SPLIT_K: {"linear": _linear},
    GATED_LINEAR: {"gated_linear": _gated_linear},
    X_NORM: {"add_rms_norm": _add_rms_norm},
}  # fmt: skip


def without(*fusions: str) -> Operations:
    """Returns the decoder's fast operations, with the named fusions replaced by separate kernels."""
    return replace(FAST, **{name: function for fusion in fusions for name, function in UNFUSED[fusion].items()})
