"""Compares products of few bits with inputs of 8 bits (--activations int8) with those of bfloat16, for each tier.

    SLUICE_ISA=avx2 python -m bench.micro.int8_inputs [--threads 2] [--rows 1,2,4,8] [--shapes 8960x1536,...]

Plain reading of as many bytes and both products are called in turn, each about a millisecond long, on weights that are
spread over more memory than the caches hold. A figure is the fastest of all calls, because a shared machine is noisy.
`share` is the time of plain reading, divided by that of the product.
"""

import argparse
import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.client.summary import aligned
from bench.micro.cpu_kernels import Format, best
from shared.config.flags import positive_int
from worker.ops import native, roofline
from worker.ops.linear.native import CpuWeight, GemmJob, pack_weight
from worker.ops.quantized_weight import INT4, INT8, IQ4_NL, QuantizedWeight

SPREAD = 256 << 20  # bytes of weights that a round reads
FORMATS = {
    "Q4_0 (int4 by 32)": Format(INT4, 32),
    "Q4_1, Q4_K (int4 by 32, minimums)": Format(INT4, 32, True),
    "int4 by 128": Format(INT4, 128),
    "IQ4_NL (table by 32)": Format(IQ4_NL, 32),
    "Q8_0 (int8 by 32)": Format(INT8, 32),
    "Q6_K (int8 by 16)": Format(INT8, 16),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Weights [N, K] in one format, each packed for both kinds of inputs."""

    floats: Sequence[CpuWeight]
    int8: Sequence[CpuWeight]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.floats)


def pair(n: int, k: int, form: Format) -> Pair:
    """Packs random weights until they take SPREAD bytes. The values do not affect the speed."""
    assert form.code_map is not None
    groups = -(-k // form.group)
    codes = torch.randint(1 << form.code_map.bits, (n, k), dtype=torch.uint8)
    minimum = torch.rand(n, groups) if form.minimum else None
    weight = QuantizedWeight(codes, form.code_map, torch.rand(n, groups), minimum, form.group)
    pack = partial(pack_weight, [weight], dtype=torch.bfloat16)
    count = max(1, -(-SPREAD // pack().nbytes))
    return Pair([pack() for _ in range(count)], [pack(int8_inputs=True) for _ in range(count)])


def product(x: Tensor, weight: CpuWeight, out: Tensor, threads: int) -> Callable[[], object]:
    """Returns a function that calls the C library as a decoder does, without the cost of Python around it."""
    job = GemmJob(weights=ctypes.addressof(weight.struct), x=x.data_ptr(), out=out.data_ptr(), t=len(x))
    gemm = native.kernels()[x.dtype].gemm
    return lambda: gemm(ctypes.addressof(job), 1, True, threads)


def measure(shape: tuple[int, int], name: str, rows: Sequence[int], rounds: int, threads: int) -> list[list[str]]:
    (n, k), found = shape, []
    weights = pair(n, k, FORMATS[name])
    size = weights.nbytes // len(weights.floats)
    memory = native.fresh_memory((len(weights.floats), size), torch.uint8).fill_(1)
    readers = [roofline.reading(part, threads) for part in memory]
    for t in rows:
        x, out = torch.randn(t, k).bfloat16(), torch.empty(t, n, dtype=torch.bfloat16)
        floats, int8 = ([product(x, one, out, threads) for one in each] for each in (weights.floats, weights.int8))
        fastest = [float("inf")] * 3
        for _ in range(rounds):
            for works in zip(readers, floats, int8, strict=True):
                fastest = list(map(min, fastest, best(1, *works)))
        plain, float_s, int8_s = fastest
        found.append(
            [f"{k:,} → {n:,}, {name}", str(t), f"{size / plain / 1e9:.1f}", f"{plain / float_s:.2f}",
             f"{plain / int8_s:.2f}", f"{float_s / int8_s:.2f}",
             *(f"{2 * t * n * k / seconds / 1e9:.0f}" for seconds in (float_s, int8_s))]
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=positive_int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive_int, default=12)
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--shapes", default="8960x1536,1536x8960", help="outputs x inputs")
    parser.add_argument("--formats", default=".", help="a regular expression; those whose name it matches")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [
        [
            "weights",
            "rows",
            "reading, GB/s",
            "share, float",
            "share, int8",
            "float ÷ int8, time",
            "GFLOP/s, float",
            "int8",
        ]
    ]
    for shape in (tuple(map(int, text.split("x"))) for text in args.shapes.split(",")):
        for name in (name for name in FORMATS if re.search(args.formats, name)):
            rows += measure(
                (shape[0], shape[1]), name, [int(t) for t in args.rows.split(",")], args.rounds, args.threads
            )
    print(f"{native.tier()}, {args.threads} threads, the fastest of {args.rounds} rounds")
    print(aligned(rows))


if __name__ == "__main__":
    main()
