"""Chooses among the forms of each operation: a Triton kernel on a GPU, the C library on a CPU, else plain PyTorch.

The form in plain PyTorch defines what the operation computes, and its docstring explains the arguments. The operations
in WITH_OPTIONS (operations.py) have another argument, `options`, which says how to launch their kernel on a GPU.
linear.py, experts.py and sample.py choose the forms of their own operations, because the form depends on how a weight
is packed, or because there is no form in C.

Triton is imported by the first call on a GPU: the import takes a second, and a machine without a GPU may lack Triton.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from worker.kernels.attention import attention_torch
from worker.kernels.cpu import bindings
from worker.kernels.cpu.recurrent import delta_net as delta_net_c
from worker.kernels.cpu.recurrent import mamba2 as mamba2_c
from worker.kernels.cpu.recurrent import short_conv as short_conv_c
from worker.kernels.gpu.launch.options import NO_OPTIONS, GpuOptions
from worker.kernels.recurrent.delta_net import delta_net_torch
from worker.kernels.recurrent.mamba2 import mamba2_torch
from worker.kernels.recurrent.short_conv import short_conv_torch
from worker.kernels.rowwise.act_and_mul import act_and_mul_torch
from worker.kernels.rowwise.activate import ACTIVATIONS, Activation, activate_torch
from worker.kernels.rowwise.norm import add_rms_norm_torch, rms_norm_torch
from worker.kernels.rowwise.output_gate import output_gate_torch
from worker.kernels.rowwise.qkv_rope_write import qkv_rope_write_torch
from worker.kernels.rowwise.rotary import rotary_torch
from worker.kernels.rowwise.store_kv import store_kv_torch
from worker.kernels.split_k import sum_split_k

Form = Callable[..., Any]
Result = TypeVar("Result")


def choosing(
    in_pytorch: Callable[..., Result], in_triton: str, in_c: Form, c_can: Callable[..., bool]
) -> Callable[..., Result]:
    """Returns an operation that calls one of these forms. The device of the first argument decides; on a CPU, `c_can`
    decides, too.

    in_triton: the name of a module and of a function in it, joined by a dot
    c_can: returns whether the C library can compute the operation for these positional arguments
    """
    on_gpu = cache(lambda: _triton(in_triton))

    def operation(x: Tensor, *args: Any, **named: Any) -> Result:
        if x.is_cuda:
            return cast(Result, on_gpu()(x, *args, **named))
        named.pop("options", None)
        form = in_c if c_can(x, *args) else in_pytorch
        return form(x, *args, **named)

    return operation


def _triton(place: str) -> Form:
    module, _, function = place.rpartition(".")
    form: Form = getattr(import_module(module), function)
    return form


# Functions that return whether the C library can compute an operation. They have the operation's arguments.


def _has_dtype(x: Tensor, *_: Any) -> bool:
    return bindings.available(x.dtype)


def _has_dtype_of_residual(x: Tensor, residual: Tensor, *_: Any) -> bool:
    return bindings.available(residual.dtype)


def _can_write(k: Tensor, v: Tensor, cache_k: Tensor, *_: Any) -> bool:
    return bindings.supports_cache(k.dtype, cache_k, k.shape[2])


def _has_shape(supports: Callable[..., bool]) -> Callable[..., bool]:
    return lambda projected, _, weights, shape, *rest: supports(projected.dtype, shape)


def _has_taps(projected: Tensor, weight: Tensor, *_: Any) -> bool:
    return short_conv_c.supports(projected.dtype, len(weight))


# Forms in C that need other arguments than the operation has


def _add_rms_norm_in_c(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *,
    offset: bool = False, x_norm: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = sum_split_k(x, residual.ndim, residual.dtype)
    x = x if x_norm is None else bindings.rms_norm(x, x_norm, eps, offset)
    return bindings.add_rms_norm(x, residual, weight, eps, offset, scale)


def _activate_in_c(x: Tensor, activation: Activation, parameters: Tensor | None = None) -> Tensor:
    return bindings.activate(x, ACTIVATIONS.index(activation), parameters)


def _act_and_mul_in_c(x: Tensor, activation: Activation) -> Tensor:
    return bindings.act_and_mul(x, ACTIVATIONS.index(activation))


rms_norm = choosing(rms_norm_torch, "worker.kernels.gpu.rowwise.norm.rms_norm_triton", bindings.rms_norm, _has_dtype)
add_rms_norm = choosing(
    add_rms_norm_torch,
    "worker.kernels.gpu.rowwise.norm.add_rms_norm_triton",
    _add_rms_norm_in_c,
    _has_dtype_of_residual,
)
rotary = choosing(rotary_torch, "worker.kernels.gpu.rowwise.rotary.rotary_triton", bindings.rotary, _has_dtype)
store_kv = choosing(
    store_kv_torch, "worker.kernels.gpu.rowwise.store_kv.store_kv_triton", bindings.store_kv, _can_write
)
output_gate = choosing(
    output_gate_torch, "worker.kernels.gpu.rowwise.output_gate.output_gate_triton", bindings.output_gate, _has_dtype
)
activate = choosing(activate_torch, "worker.kernels.gpu.rowwise.activate.activate_triton", _activate_in_c, _has_dtype)
act_and_mul = choosing(
    act_and_mul_torch, "worker.kernels.gpu.rowwise.act_and_mul.act_and_mul_triton", _act_and_mul_in_c, _has_dtype
)
delta_net = choosing(
    delta_net_torch,
    "worker.kernels.gpu.recurrent.delta_net.delta_net_triton",
    delta_net_c.delta_net,
    _has_shape(delta_net_c.supports),
)
mamba2 = choosing(
    mamba2_torch, "worker.kernels.gpu.recurrent.mamba2.mamba2_triton", mamba2_c.mamba2, _has_shape(mamba2_c.supports)
)
short_conv = choosing(
    short_conv_torch, "worker.kernels.gpu.recurrent.short_conv.short_conv_triton", short_conv_c.short_conv, _has_taps
)

# Computes qkv_rope_write by three operations in a row, with the same bits.
qkv_rope_write_unfused = partial(qkv_rope_write_torch, norm=rms_norm, rotate=rotary, write=store_kv)


def qkv_rope_write(
    qkv: Tensor, cache_k: Tensor, cache_v: Tensor, cos: Tensor, *args: Tensor,
    q_norm: Tensor | None, dtype: torch.dtype, options: GpuOptions = NO_OPTIONS, **named: Any,
) -> Tensor:  # fmt: skip
    """Computes the same as qkv_rope_write_torch. On a GPU, it is one kernel unless a norm covers all heads of a row."""
    if qkv.is_cuda and (q_norm is None or len(q_norm) == cos.shape[1]):
        from worker.kernels.gpu.rowwise.qkv_rope_write import qkv_rope_write_triton

        return qkv_rope_write_triton(
            qkv, cache_k, cache_v, cos, *args, q_norm=q_norm, dtype=dtype, options=options, **named
        )
    if not qkv.is_cuda and bindings.supports_cache(dtype, cache_k, cos.shape[1]):
        summed = sum_split_k(qkv, 2, dtype)
        return bindings.qkv_rope_write(summed, cache_k, cache_v, cos, *args, q_norm=q_norm, **named)
    return qkv_rope_write_unfused(qkv, cache_k, cache_v, cos, *args, q_norm=q_norm, dtype=dtype, **named)


def attention(
    q: Tensor, cache_k: Tensor, *args: Any,
    next_weights: Sequence[Tensor] = (), options: GpuOptions = NO_OPTIONS, **named: Any,
) -> Tensor:  # fmt: skip
    """Computes the same as attention_torch. On a GPU, an option loads `next_weights` into the L2 cache while attention
    runs.
    """
    if q.is_cuda:
        from worker.kernels.gpu.attention.attention import attention_triton
        from worker.kernels.gpu.products.prefetch_branch import prefetching

        with prefetching(len(q), next_weights, options):
            return attention_triton(q, cache_k, *args, options=options, **named)
    form = bindings.attention if bindings.supports_cache(q.dtype, cache_k, q.shape[2]) else attention_torch
    return form(q, cache_k, *args, **named)
