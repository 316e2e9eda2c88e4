"""Loads the weights of the next products into the L2 cache while attention runs.

In a decode, attention leaves most of the memory's bandwidth unused: a few programs read a few megabytes. So kernels
that only prefetch run beside attention, on a second stream, which becomes a second branch of a CUDA graph. The kernel
after attention waits for the two branches. Without a graph, the additional launches cost the host more time than the
device gains.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.launch.dependent_launch import FEW_ROWS, prefetch_to_l2
from worker.kernels.gpu.launch.options import GpuOptions

PROGRAM_BYTES = 64 << 10
CACHE_BYTES = 30 << 20  # about half the L2 cache of an H200: the other half is left for attention's own data


@triton.jit
def _prefetch_kernel(ptr, size, BYTES: tl.constexpr):
    """Prefetches `size` elements at ptr. Each program prefetches BYTES bytes of them."""
    elements: tl.constexpr = BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
    first = tl.program_id(0).to(tl.int64) * elements
    prefetch_to_l2(ptr + first, 0, 1, size - first, 1, BYTES)


@contextmanager
def prefetching(rows: int, weights: Sequence[Tensor], options: GpuOptions) -> Iterator[None]:
    """Prefetches weights beside the kernels that are launched inside this context, if the step has few rows.

    rows: how many rows the step has; weights: contiguous tensors, in the order in which they will be read
    """
    beside = options.branch
    if beside is None or rows > FEW_ROWS:
        yield
        return
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for weight, size in first_bytes(weights, CACHE_BYTES):
            _prefetch_kernel[(triton.cdiv(size, PROGRAM_BYTES),)](weight, weight.numel(), BYTES=PROGRAM_BYTES)
    yield
    torch.cuda.current_stream().wait_stream(beside)


def first_bytes(weights: Sequence[Tensor], most: int) -> Iterator[tuple[Tensor, int]]:
    """Yields the weights that contain some of the first `most` bytes of all weights, each with the number of these
    bytes.
    """
    for weight in weights:
        if most > 0:
            yield weight, min(weight.nbytes, most)
        most -= weight.nbytes
