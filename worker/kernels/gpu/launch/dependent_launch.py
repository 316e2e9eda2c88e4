"""Programmatic dependent launch (PDL): a kernel starts while the kernel before it still runs.

Without it, a kernel starts once the one before it has ended and its results are in memory. In a decode, whose kernels
take a few microseconds each, the device is idle for a good part of the time between them. With it, the programs of the
next kernel start as soon as all programs of this one have called `launch_dependents` and there is room for them. They
prepare what depends on no other kernel, and wait.

The rules for a kernel that is launched with `launch_pdl`:
- Every program waits, whatever else it skips. The next kernel may rely on all kernels before this one only because this
  one has waited for them.
- The wait precedes all loads of what other kernels write, and all stores: an earlier kernel may still read there.
- The wait precedes all loops. Inside a loop, Triton's pipelining moves loads of the first iterations before it.
Only what no kernel writes may be loaded before: here, these are weights.
"""

from typing import Any

import triton
import triton.language as tl

from worker.kernels.gpu.launch.compiled import COMPILED
from worker.kernels.gpu.launch.options import GpuOptions

LINE_BYTES = tl.constexpr(128)  # a line of the L2 cache
PREFETCHED_BYTES = 64 << 10  # of weights by a program: what a multiprocessor's share of the memory sends in 2 µs
FEW_ROWS = 64  # larger products are limited by arithmetic, and have more programs than fit at once


def pdl_options(options: GpuOptions) -> dict[str, Any]:
    """Returns the constant PDL of a kernel, and how to launch it."""
    return {"PDL": True, "launch_pdl": True} if options.pdl else {"PDL": False}


def product_options(options: GpuOptions, rows: int) -> dict[str, Any]:
    """Returns the constants PDL and PREFETCH of a product with tiles of `rows` tokens, and how to launch it."""
    prefetched = PREFETCHED_BYTES if options.weight_prefetch and rows <= FEW_ROWS else 0
    return pdl_options(options) | {"PREFETCH": prefetched}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel start. All programs call this first. A kernel without PDL does it when its programs end."""
    if PDL and COMPILED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_kernels(PDL: tl.constexpr):
    """Waits until all kernels before this one have ended and what they stored can be loaded."""
    if PDL and COMPILED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_dependent(PDL: tl.constexpr):
    """Starts a program that has nothing to prepare before it waits."""
    launch_dependents(PDL)
    wait_for_kernels(PDL)


@triton.jit
def prefetch_to_l2(ptr, stride, runs, size, RUNS: tl.constexpr, BYTES: tl.constexpr):
    """Starts to load BYTES bytes into the L2 cache, and does not wait for them: the first of RUNS runs in equal parts.

    stride: elements from one run to the next. runs, size: how many runs there are, and elements of a run. Fewer or
    shorter runs are no error. With BYTES 0, does nothing.
    """
    if BYTES and COMPILED:
        LINES: tl.constexpr = BYTES // LINE_BYTES // RUNS
        line: tl.constexpr = LINE_BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
        run = tl.minimum(tl.arange(0, RUNS), runs - 1).to(tl.int64)
        element = tl.minimum(tl.arange(0, LINES) * line, size - 1)
        address = (ptr + run[:, None] * stride + element[None, :]).to(tl.uint64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )
