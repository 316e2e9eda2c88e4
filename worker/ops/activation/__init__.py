"""Activations of feed-forward networks, with or without a gate, and output gates: chooses which form runs."""

from torch import Tensor

from worker.ops.activation import native
from worker.ops.activation.reference import act_and_mul_torch, activate_torch, output_gate_torch
from worker.ops.choose import choosing, has_dtype
from worker.spec import ACTIVATIONS, Activation


def _activate_in_c(x: Tensor, activation: Activation, parameters: Tensor | None = None) -> Tensor:
    return native.activate(x, ACTIVATIONS.index(activation), parameters)


def _act_and_mul_in_c(x: Tensor, activation: Activation) -> Tensor:
    return native.act_and_mul(x, ACTIVATIONS.index(activation))


output_gate = choosing(
    output_gate_torch, "worker.ops.activation.triton.output_gate_triton", native.output_gate, has_dtype
)
activate = choosing(activate_torch, "worker.ops.activation.triton.activate_triton", _activate_in_c, has_dtype)
act_and_mul = choosing(
    act_and_mul_torch, "worker.ops.activation.triton.act_and_mul_triton", _act_and_mul_in_c, has_dtype
)
