"""Micro benchmark of the CPU library beside plain torch, in the same run: `python -m bench.native [threads]`.

A shared machine is noisy: each figure is the best of several rounds, ours and torch's taken in turns. Believe the ratio.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels import gate, native, norm

ROUNDS = 12
SPREAD = 256 << 20  # bytes of different weights or caches in a round: more than a cache holds


def best(ours: Callable[[], object], torchs: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the fastest round of each, measured alternately."""
    fastest = [float("inf")] * 2
    for _ in range(ROUNDS):
        for i, run in enumerate((ours, torchs)):
            begin = time.perf_counter()
            run()
            fastest[i] = min(fastest[i], time.perf_counter() - begin)
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
        packed = [native.pack_linear(weight) for weight in weights]
        for t in (1, 8, 32, 128, 512, 1024):
            some = slice(None if t <= 32 else 4)
            x, count = torch.randn(t, k).to(dtype), len(weights[some])
            ours, torchs = best(
                lambda x=x, some=some: [native.linear(x, weight) for weight in packed[some]],
                lambda x=x, some=some: [F.linear(x, weight) for weight in weights[some]],
            )
            per = (ours / count, torchs / count)
            what = f"linear {dtype.itemsize * 8} bit {t} x {k} x {n}"
            if t <= 32:
                line(what, *per, size, "GB/s", 1e9)
            else:
                line(what, *per, 2 * t * n * k, "TFLOP/s", 1e12)


def attend(sequences: int, rows: int, length: int, dtype: torch.dtype, page: int = 16) -> None:
    """Ours reads shuffled pages; torch gets dense keys and values, gathered beforehand for nothing."""
    heads, kv_heads, d = 16, 8, 128
    each = -(-length // page)
    pages = (torch.randperm(sequences * each) + 1).int().view(sequences, each)
    caches = [torch.randn(sequences * each + 1, page, kv_heads, d).to(dtype) for _ in "kv"]
    dense = [torch.randn(sequences, kv_heads, length, d).to(dtype) for _ in "kv"]
    starts = (torch.arange(sequences + 1) * rows).int()
    lengths = torch.full((sequences,), length).int()
    q = torch.randn(sequences * rows, heads, d).to(dtype)
    own = q.view(sequences, rows, heads, d).transpose(1, 2).contiguous()
    mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)

    def ours() -> Tensor:
        return native.attention(q, *caches, starts, lengths, pages, scale=d**-0.5, window=0)

    def torchs() -> Tensor:
        if rows == length:
            return F.scaled_dot_product_attention(own, *dense, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(own, *dense, attn_mask=mask, enable_gqa=True)

    took = best(ours, torchs)
    what = f"attention {dtype.itemsize * 8} bit {sequences} x {rows} at {length}"
    if rows == 1:
        line(what, *took, 2 * sequences * length * kv_heads * d * dtype.itemsize, "GB/s", 1e9)
    else:
        line(what, *took, 4 * sequences * heads * d * rows * (length - rows / 2), "TFLOP/s", 1e12)


def rows(dtype: torch.dtype) -> None:
    for t in (1, 32, 1024):
        x, residual, weight = torch.randn(t, 1024).to(dtype), torch.randn(t, 1024).to(dtype), torch.ones(1024, dtype=dtype)
        wide = torch.randn(t, 6144).to(dtype)
        both = best(
            lambda x=x, r=residual, w=weight: native.add_rms_norm(x, r, w, 1e-6),
            lambda x=x, r=residual, w=weight: norm.add_rms_norm_torch(x, r, w, 1e-6),
        )
        line(f"add + norm {dtype.itemsize * 8} bit {t} x 1024", *both, 4 * x.nbytes, "GB/s", 1e9)
        both = best(lambda w=wide: native.gate(w, "silu"), lambda w=wide: gate.gate_torch(w, "silu"))
        line(f"gate {dtype.itemsize * 8} bit {t} x 6144", *both, wide.nbytes * 1.5, "GB/s", 1e9)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    print(f"{native.tier()}, {torch.get_num_threads()} threads, best of {ROUNDS}")
    for dtype in (torch.bfloat16, torch.float32):
        if not native.available(dtype):
            raise SystemExit("the C library does not run here")
        rows(dtype)
        for sequences, chunk, length in ((1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (1, 1, 8192), (1, 1024, 1024), (1, 256, 4096)):
            attend(sequences, chunk, length, dtype)
        products(dtype)


if __name__ == "__main__":
    main()
