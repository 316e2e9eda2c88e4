"""Compares the C library for CPUs with plain torch in the same run.

    python -m bench.micro.cpu_kernels [threads]

A shared machine is noisy, so each figure is the best of several rounds that alternate between the library and torch.
With one thread, a figure is CPU time. Only ratios are reliable.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels import act_and_mul, norm
from worker.kernels.cpu import bindings
from worker.kernels.cpu.packed_weight import CpuWeight, pack_weight

ROUNDS = 12
SPREAD = 256 << 20  # bytes of different weights or K/V in a round: more than a CPU cache holds


def best(ours: Callable[[], object], torchs: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of the fastest round of `ours` and of `torchs`, whose rounds alternate."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    fastest = [float("inf")] * 2
    for _ in range(ROUNDS):
        for i, run in enumerate((ours, torchs)):
            begin = clock()
            run()
            fastest[i] = min(fastest[i], clock() - begin)
    return fastest[0], fastest[1]


def line(what: str, ours: float, torchs: float, work: float, unit: str, scale: float) -> None:
    print(
        f"{what:34} {ours * 1e3:8.3f} ms {work / ours / scale:7.2f} {unit}   "
        f"torch {torchs * 1e3:8.3f} ms {work / torchs / scale:7.2f} {unit}   {torchs / ours:5.2f} x",
        flush=True,
    )


def products(dtype: torch.dtype) -> None:
    for n, k in ((4096, 1024), (6144, 1024), (1024, 3072)):
        size = n * k * dtype.itemsize
        weights = [torch.randn(n, k).to(dtype) for _ in range(max(1, SPREAD // size))]
        packed = [pack_weight([weight], dtype=weight.dtype) for weight in weights]
        for t in (1, 8, 32):
            line(f"linear {dtype.itemsize * 8} bit {t} x {k} x {n}", *product(t, weights, packed), size, "GB/s", 1e9)
        for t in (128, 512, 1024):
            both = product(t, weights[:4], packed[:4])
            line(f"linear {dtype.itemsize * 8} bit {t} x {k} x {n}", *both, 2 * t * n * k, "TFLOP/s", 1e12)


def product(t: int, weights: list[Tensor], packed: list[CpuWeight]) -> tuple[float, float]:
    x = torch.randn(t, packed[0].k).to(packed[0].dtype)

    def ours() -> None:
        for weight in packed:
            bindings.linear(x, weight)

    def torchs() -> None:
        for weight in weights:
            F.linear(x, weight)

    took = best(ours, torchs)
    return took[0] / len(packed), took[1] / len(packed)


def attend(sequences: int, rows: int, length: int, dtype: torch.dtype, page: int = 32) -> None:
    """Compares attention. Ours reads shuffled pages; torch gets dense keys and values, whose gathering is not timed."""
    heads, kv_heads, d = 16, 8, 128
    each = -(-length // page)
    pages = (torch.randperm(sequences * each) + 1).int().view(sequences, each)
    cache_k, cache_v = (torch.randn(sequences * each + 1, page, kv_heads, d).to(dtype) for _ in "kv")
    k, v = (torch.randn(sequences, kv_heads, length, d).to(dtype) for _ in "kv")
    starts = (torch.arange(sequences + 1) * rows).int()
    lengths = torch.full((sequences,), length).int()
    q = torch.randn(sequences * rows, heads, d).to(dtype)
    own = q.view(sequences, rows, heads, d).transpose(1, 2).contiguous()
    mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)

    def ours() -> Tensor:
        return bindings.attention(q, cache_k, cache_v, starts, lengths, pages, scale=d**-0.5, window=0)

    def torchs() -> Tensor:
        if rows == length:
            return F.scaled_dot_product_attention(own, k, v, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(own, k, v, attn_mask=mask, enable_gqa=True)

    took = best(ours, torchs)
    what = f"attention {dtype.itemsize * 8} bit {sequences} x {rows} at {length}"
    if rows == 1:
        line(what, *took, 2 * sequences * length * kv_heads * d * dtype.itemsize, "GB/s", 1e9)
    else:
        line(what, *took, 4 * sequences * heads * d * rows * (length - rows / 2), "TFLOP/s", 1e12)


def rows(t: int, dtype: torch.dtype) -> None:
    x, residual, wide = (torch.randn(t, n).to(dtype) for n in (1024, 1024, 6144))
    weight = torch.ones(1024, dtype=dtype)

    def ours() -> None:
        bindings.add_rms_norm(x, residual, weight, 1e-6)

    def torchs() -> None:
        norm.add_rms_norm_torch(x, residual, weight, 1e-6)

    line(f"add + norm {dtype.itemsize * 8} bit {t} x 1024", *best(ours, torchs), 4 * x.nbytes, "GB/s", 1e9)
    both = best(lambda: bindings.act_and_mul(wide, "silu"), lambda: act_and_mul.act_and_mul_torch(wide, "silu"))
    line(f"gate {dtype.itemsize * 8} bit {t} x 6144", *both, wide.nbytes * 1.5, "GB/s", 1e9)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    print(f"{bindings.tier()}, {torch.get_num_threads()} threads, best of {ROUNDS}")
    for dtype in (torch.bfloat16, torch.float32):
        if not bindings.available(dtype):
            raise SystemExit("the C library does not run here")
        for t in (1, 32, 1024):
            rows(t, dtype)
        for case in ((1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (1, 1, 8192), (1, 1024, 1024), (1, 256, 4096)):
            attend(*case, dtype)
        products(dtype)


if __name__ == "__main__":
    main()
