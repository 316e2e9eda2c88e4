"""The output gate of attention: what attention gives is multiplied by the sigmoid of a linear of the same input."""

from torch import Tensor

from worker.kernels.cpu import bindings
from worker.kernels.gpu.options import NO_OPTIONS, GpuOptions


def output_gate(x: Tensor, gate: Tensor, *, options: GpuOptions = NO_OPTIONS) -> Tensor:
    """Returns x * sigmoid(gate). The sigmoid is rounded to x's dtype before the multiplication.

    x, gate [T, N] contiguous, of one dtype.
    """
    if x.is_cuda:
        from worker.kernels.gpu.output_gate import output_gate_triton

        return output_gate_triton(x, gate, options=options)
    if bindings.available(x.dtype):
        return bindings.output_gate(x, gate)
    return output_gate_torch(x, gate)


def output_gate_torch(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.sigmoid()
