"""Collects the operations of a decoder in one record: the fastest functions (FAST), or plain PyTorch (TORCH)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from worker.ops.activation import act_and_mul, activate, output_gate
from worker.ops.activation.reference import act_and_mul_torch, activate_torch, output_gate_torch
from worker.ops.attention import attention
from worker.ops.attention.reference import attention_torch
from worker.ops.choose import of_some_models
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.linear import gated_linear, linear
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.reference import gated_linear_torch, linear_torch
from worker.ops.moe import experts, linear_per_head
from worker.ops.moe.reference import experts_torch, linear_per_head_torch
from worker.ops.norm import add_rms_norm, rms_norm
from worker.ops.norm.reference import add_rms_norm_torch, rms_norm_torch
from worker.ops.rope import qkv_rope_write
from worker.ops.rope.reference import qkv_rope_write_torch
from worker.ops.sampling import sample_plain
from worker.ops.sampling.reference import sample_torch

if TYPE_CHECKING:
    from worker.ops.linear.lora_native import StepAdaptersC


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations that a decoder calls. A field holds the function of the same name, or the form of this function in
    plain PyTorch.
    """

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    qkv_rope_write: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    output_gate: Callable[..., Tensor]
    delta_net: Callable[..., Tensor]
    mamba2: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    gated_linear: Callable[..., Tensor]
    activate: Callable[..., Tensor]
    act_and_mul: Callable[..., Tensor]
    experts: Callable[..., Tensor]
    linear_per_head: Callable[..., Tensor]
    sample_plain: Callable[..., Tensor]

    def linear_add_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor | None, eps: float, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns add_rms_norm(linear(x, packed), residual, weight, eps, ...)."""
        return self.add_rms_norm(self.linear(x, packed, split_k=True), residual, weight, eps, **how)

    def maybe_linear_add_norm(
        self, x: Tensor, packed: PackedLinear | None, residual: Tensor, weight: Tensor | None, eps: float, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns linear_add_norm(x, packed, ...). If `packed` is None, there is no linear: norms x itself plus the
        residual.
        """
        if packed is None:
            return self.add_rms_norm(x, residual, weight, eps, **how)
        return self.linear_add_norm(x, packed, residual, weight, eps, **how)

    def all_columns(self, x: Tensor) -> Tensor:
        """Returns the columns of all ranks, where x [T, N] has those of this rank. Without other ranks, returns x."""
        return x

    def whole_linear(self, x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        """Returns linear(x, packed) with the columns of all ranks. x has them already."""
        return self.all_columns(self.linear(x, packed, **how))

    def in_c(self) -> "StepAdaptersC | None":
        """Returns a step's adapters for the C library's loop; None if these operations are not FAST with adapters
        added.
        """
        return None


Exchange = Callable[[Operations], Operations]


def alone(operations: Operations) -> Operations:
    """Returns the operations unchanged: a decoder without other ranks has no columns to gather."""
    return operations


@dataclass(frozen=True, slots=True)
class OperationsWithFusedNorms(Operations):
    """Operations that compute a matrix product and the norm after it in one kernel, if there is a kernel for both."""

    options: GpuOptions = NO_OPTIONS

    def linear_add_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor | None, eps: float, **how: Any
    ) -> tuple[Tensor, Tensor]:
        if x.is_cuda and packed.invariant and packed.scale is None and not packed.codes:
            from worker.ops.linear.triton_fused import can_add_norm, linear_add_norm_triton

            if can_add_norm(x, packed.weight):
                return linear_add_norm_triton(
                    x, packed.weight, packed.bias, residual, weight, eps, options=self.options, **how
                )
        return Operations.linear_add_norm(self, x, packed, residual, weight, eps, **how)


FAST = Operations(
    rms_norm,
    add_rms_norm,
    qkv_rope_write,
    attention,
    output_gate,
    of_some_models("worker.ops.recurrent.delta_net"),
    of_some_models("worker.ops.recurrent.mamba2"),
    of_some_models("worker.ops.recurrent.short_conv"),
    linear,
    gated_linear,
    activate,
    act_and_mul,
    experts,
    linear_per_head,
    sample_plain,
)
# The functions in TORCH are not batch-invariant: the bits of a row may depend on other rows. Some of them synchronize
# with the GPU.
TORCH = Operations(
    rms_norm_torch,
    add_rms_norm_torch,
    qkv_rope_write_torch,
    attention_torch,
    output_gate_torch,
    of_some_models("worker.ops.recurrent.reference.delta_net_torch"),
    of_some_models("worker.ops.recurrent.reference.mamba2_torch"),
    of_some_models("worker.ops.recurrent.reference.short_conv_torch"),
    linear_torch,
    gated_linear_torch,
    activate_torch,
    act_and_mul_torch,
    experts_torch,
    linear_per_head_torch,
    sample_torch,
)
# The operations whose GPU kernels can be launched with options.
WITH_OPTIONS = (
    "rms_norm", "add_rms_norm", "qkv_rope_write", "attention", "output_gate", "linear", "gated_linear", "activate",
    "act_and_mul",
)  # fmt: skip


def with_options(operations: Operations, options: GpuOptions) -> Operations:
    """Returns operations whose GPU kernels are launched with `options`. operations: FAST, possibly with some functions
    replaced
    """
    if options == NO_OPTIONS:
        return operations
    bound = {item.name: getattr(operations, item.name) for item in fields(Operations)}
    bound |= {name: partial(bound[name], options=options) for name in WITH_OPTIONS}
    return OperationsWithFusedNorms(**bound, options=options) if options.fused_norms else Operations(**bound)
