"""Calls the activations of the C library (csrc/activation.c)."""

import torch
from torch import Tensor

from worker.ops.native import address, kernels


def activate(x: Tensor, activation: int, parameters: Tensor | None = None) -> Tensor:
    """Computes the same as `activate_torch`, for x [T, I] contiguous. activation: its index in ACTIVATIONS"""
    assert x.ndim == 2 and x.is_contiguous() and activation in (0, 1, 2, 4, 5)
    assert (activation == 4) == (parameters is not None)
    check_parameters(parameters)
    out = torch.empty_like(x)
    kernels()[x.dtype].activate(
        x.data_ptr(), out.data_ptr(), address(parameters), x.shape[0], x.shape[1], activation, torch.get_num_threads()
    )
    return out


def check_parameters(parameters: Tensor | None) -> None:
    """Asserts that the parameters of an activation have the shape and dtype that the library reads."""
    assert parameters is None or (parameters.shape == (4,) and parameters.dtype == torch.float32)
    assert parameters is None or parameters.is_contiguous()


def act_and_mul(x: Tensor, activation: int) -> Tensor:
    """Computes the same as `act_and_mul_torch`, for x [T, 2 * I] contiguous. activation: its index in ACTIVATIONS"""
    assert x.ndim == 2 and x.is_contiguous() and x.shape[1] % 2 == 0 and activation in (0, 1, 2, 3, 5)
    n = x.shape[1] // 2
    out = torch.empty(x.shape[0], n, dtype=x.dtype)
    up = x.data_ptr() + n * x.element_size()
    kernels()[x.dtype].act_and_mul(
        x.data_ptr(), up, out.data_ptr(), x.shape[0], n, 2 * n, 2 * n, activation, torch.get_num_threads()
    )
    return out


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Computes the same as `output_gate_torch`, for x and gate [T, N] contiguous."""
    assert x.shape == gate.shape and x.dtype == gate.dtype and x.ndim == 2
    assert x.is_contiguous() and gate.is_contiguous()
    out = torch.empty_like(x)
    kernels()[x.dtype].output_gate(
        x.data_ptr(), gate.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], torch.get_num_threads()
    )
    return out
