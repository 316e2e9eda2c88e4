"""Triton kernel for output_gate: one program computes a block of elements."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.launch.dependent_launch import pdl_options, start_dependent
from worker.kernels.gpu.launch.options import NO_OPTIONS, GpuOptions

BLOCK = 1024


@triton.jit
def _output_gate_kernel(x_ptr, gate_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_dependent(PDL)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < size
    x = tl.load(x_ptr + element, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + element, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, x * (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype), mask=mask)


def output_gate_triton(x: Tensor, gate: Tensor, *, options: GpuOptions = NO_OPTIONS) -> Tensor:
    assert x.shape == gate.shape and x.dtype == gate.dtype and x.is_contiguous() and gate.is_contiguous()
    out = torch.empty_like(x)
    _output_gate_kernel[(triton.cdiv(x.numel(), BLOCK),)](
        x, gate, out, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False, **pdl_options(options)
    )
    return out
