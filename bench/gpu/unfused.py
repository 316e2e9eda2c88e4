"""What the decoder calls, taken apart again: for each fusion the separate kernels that give the same bits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from worker.kernels.gate import Activation, gate
from worker.kernels.linear import PackedLinear, linear
from worker.kernels.norm import add_rms_norm, rms_norm
from worker.kernels.rotary import rotary
from worker.kernels.terms import added
from worker.kernels.write import write_kv
from worker.model import decoder

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


def _heads(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: bool,
    dtype: torch.dtype,
) -> Tensor:
    kv_heads, dim = cache_k.shape[2:]
    whole = added(qkv, 2, dtype)
    parts = whole.view(len(whole), -1, dim)
    q, k, v = parts.split_with_sizes([parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, offset=offset), rms_norm(k, k_norm, eps, offset=offset)
    q, k = rotary(q, k, cos, sin, positions)
    write_kv(k, v, cache_k, cache_v, slots)
    return q


INSTEAD: Mapping[str, Mapping[str, Callable[..., object]]] = {
    HEADS: {"heads": _heads},
    TERMS: {"linear": _whole},
    GATE: {"gated_linear": _gate},
    AFTER: {"add_rms_norm": _after},
}  # fmt: skip


@contextmanager
def without(*fusions: str) -> Iterator[None]:
    """The decoder calls the separate kernels, as long as this lasts."""
    instead = {name: function for fusion in fusions for name, function in INSTEAD[fusion].items()}
    before = {name: getattr(decoder, name) for name in instead}
    for name, function in instead.items():
        setattr(decoder, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(decoder, name, function)
