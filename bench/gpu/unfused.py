"""What the decoder calls, taken apart again: for each fusion the separate kernels that give the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from worker.kernels.gate import Activation, gate
from worker.kernels.heads import heads_apart
from worker.kernels.linear import PackedLinear, linear
from worker.kernels.norm import add_rms_norm, rms_norm
from worker.kernels.operations import FAST, Operations
from worker.kernels.terms import added

GATE = "gate inside its product"
TERMS = "parts of products added by the next kernel"
AFTER = "norm after attention and feed-forward in the next one"
HEADS = "norm of heads, rotary and K/V write in one"


def _gate(x: Tensor, packed: PackedLinear, activation: Activation) -> Tensor:
    return gate(linear(x, packed), activation)


def _whole(x: Tensor, packed: PackedLinear, *, wide: bool = False, terms: bool = False) -> Tensor:
    return linear(x, packed, wide=wide)


def _after(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: bool = False, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if after is not None:
        x = rms_norm(added(x, residual.ndim, residual.dtype), after, eps, offset=offset)
    return add_rms_norm(x, residual, weight, eps, offset=offset)


INSTEAD: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    HEADS: {"heads": heads_apart},
    TERMS: {"linear": _whole},
    GATE: {"gated_linear": _gate},
    AFTER: {"add_rms_norm": _after},
}  # fmt: skip


def without(*fusions: str) -> Operations:
    """What a decoder computes with, these taken apart."""
    return replace(FAST, **{name: function for fusion in fusions for name, function in INSTEAD[fusion].items()})
