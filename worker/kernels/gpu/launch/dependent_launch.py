"""Programmatic dependent launch (PDL): a kernel starts while the previous kernel still runs.

Without PDL, a kernel starts when the previous kernel has ended and its results are in memory. In a decode, whose
kernels take a few microseconds each, the device is then idle for a good part of the time. With PDL, the programs of the
next kernel start as soon as all programs of the current kernel have called `launch_dependents` and the device has room
for more programs. They prepare what depends on no other kernel, and then wait.

The rules for a kernel that is launched with `launch_pdl`:
- Every program of the kernel waits, even if it has nothing else to do. The next kernel waits only for this kernel. It
  may use the results of earlier kernels only because this kernel has waited for them.
- The wait precedes all loads of data that other kernels write, and all stores: an earlier kernel may still read there.
- The wait precedes all loops, because Triton's pipelining moves a loop's first loads before a wait inside the loop.
Before the wait, a program may load only data that no kernel writes, for example weights.
"""

from typing import Any

import triton
import triton.language as tl

from worker.kernels.gpu.launch.compiled import COMPILED
from worker.kernels.gpu.launch.options import GpuOptions

LINE_BYTES = tl.constexpr(128)  # a line of the L2 cache
PREFETCHED_BYTES = 64 << 10  # weight bytes that a program prefetches: a multiprocessor's share of 2 µs of bandwidth
FEW_ROWS = 64  # products with more rows are limited by arithmetic, and have more programs than the device can hold


def pdl_options(options: GpuOptions) -> dict[str, Any]:
    """Returns a kernel's launch arguments for PDL: its constant PDL, and Triton's `launch_pdl`."""
    return {"PDL": True, "launch_pdl": True} if options.pdl else {"PDL": False}


def product_options(options: GpuOptions, rows: int) -> dict[str, Any]:
    """Returns the launch arguments of a matrix product for PDL and prefetching. rows: how many rows a tile has"""
    prefetched = PREFETCHED_BYTES if options.weight_prefetch and rows <= FEW_ROWS else 0
    return pdl_options(options) | {"PREFETCH": prefetched}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel start. All programs call this first. Without PDL, the next kernel starts when all programs
    have ended.
    """
    if PDL and COMPILED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_kernels(PDL: tl.constexpr):
    """Waits until all earlier kernels have ended and their stores are visible."""
    if PDL and COMPILED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_dependent(PDL: tl.constexpr):
    """Begins a program that has nothing to prepare: lets the next kernel start, and waits for earlier kernels."""
    launch_dependents(PDL)
    wait_for_kernels(PDL)


@triton.jit
def prefetch_to_l2(ptr, stride, runs, size, RUNS: tl.constexpr, BYTES: tl.constexpr):
    """Starts to load BYTES bytes into the L2 cache, and does not wait for them. They are the first bytes of RUNS runs
    of memory, equally many of each run.

    stride: elements from one run to the next; runs: how many runs there are; size: elements of a run. There may be
    fewer runs than RUNS, or shorter runs than BYTES / RUNS. With BYTES 0, does nothing.
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
