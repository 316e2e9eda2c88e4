"""Compares the C library for CPUs with the machine's limits, which are measured in the same run.

    SLUICE_ISA=avx2 python -m bench.micro.cpu_kernels [--threads 2] [--sections products,decode,experts,attention,rows]

Matrix products of 512 rows are compared with the multiply-add peak, and with torch's faster product of bf16 and fp32;
torch's libraries are limited to the same instruction set. Products of few rows are compared with the memory bandwidth:
the bytes are those of the packed weight or of the chosen experts. A shared machine is noisy, so each figure is the best
of several rounds, and the compared functions alternate.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat

from shared.config.flags import comma_separated, positive_int
from worker.ops.native_build import VARIABLE

TORCH_CAPS = {  # SLUICE_ISA → the name of this instruction set in oneDNN, MKL and ATen
    "avx2": ("AVX2", "AVX2", "avx2"),
    "avx512": ("AVX512_CORE", "AVX512", "avx512"),
    "avx512bf16": ("AVX512_CORE_BF16", "AVX512", "avx512"),
}
for name, cap in zip(
    ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"),
    TORCH_CAPS.get(os.environ.get(VARIABLE, ""), ()),
    strict=False,
):
    os.environ.setdefault(name, cap)  # torch reads these variables when it is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.client.summary import aligned, number  # noqa: E402
from worker.ops import (  # noqa: E402
    activation,
    roofline,
)
from worker.ops import native as c_library  # noqa: E402
from worker.ops.activation import reference as act_and_mul  # noqa: E402
from worker.ops.attention import native as attention_native  # noqa: E402
from worker.ops.linear import linear  # noqa: E402
from worker.ops.linear.packed import PackedLinear, pack, pack_stacked  # noqa: E402
from worker.ops.moe import experts  # noqa: E402
from worker.ops.moe.packed import Experts, pack_experts  # noqa: E402
from worker.ops.norm import native as norm_native  # noqa: E402
from worker.ops.norm import reference as norm  # noqa: E402
from worker.ops.quantized_weight import INT4, INT8, CodeMap, QuantizedWeight  # noqa: E402
from worker.ops.roofline import Floors  # noqa: E402

SPREAD = 256 << 20  # bytes of weights or K/V that a round reads: more than a CPU cache holds
SHAPES = ((4096, 1024), (6144, 1024), (1024, 3072))  # outputs and inputs of the linears of a small model
MANY, FEW = 512, (1, 8, 32)
EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768  # a layer of Qwen3-30B-A3B


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format. code_map: None if the format is not quantized. group: number of inputs that share a scale."""

    code_map: CodeMap | None = None
    group: int = 0
    minimum: bool = False


FORMATS = {
    "bf16": Format(),
    "int8": Format(INT8, 1 << 30),
    "int8-g32": Format(INT8, 32),
    "int4-g128": Format(INT4, 128),
    "int4-g32": Format(INT4, 32),
    "int4-g32-min": Format(INT4, 32, True),  # the layout of Q4_K weights in memory
}


def best(rounds: int, *works: Callable[[], object]) -> list[float]:
    """Calls all `works` in each round. Returns the seconds of the fastest call of each."""
    fastest = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            begin = time.perf_counter()
            work()
            fastest[i] = min(fastest[i], time.perf_counter() - begin)
    return fastest


def quantized(n: int, k: int, form: Format) -> Tensor | QuantizedWeight:
    """Returns a random weight [n, k] in a format. The values do not affect the speed."""
    if form.code_map is None:
        return torch.randn(n, k).bfloat16()
    groups = -(-k // form.group)
    codes = torch.randint(1 << form.code_map.bits, (n, k), dtype=torch.uint8)
    minimum = torch.rand(n, groups) if form.minimum else None
    return QuantizedWeight(codes, form.code_map, torch.rand(n, groups), minimum, form.group)


def packed(weight: Tensor | QuantizedWeight) -> PackedLinear:
    return pack_stacked([weight], dtype=torch.bfloat16, invariant=True)


def products(names: Sequence[str], limits: Floors, rounds: int) -> list[list[str]]:
    """Measures matrix products of many rows: GFLOP/s, as figures and as shares of torch's faster product and of the
    multiply-add peak."""
    peak = max(limits.fp32_gflop_s, limits.bf16_gflop_s or 0.0)
    rows = [
        [f"{MANY} rows, GFLOP/s", "Sluice", "torch bf16", "torch fp32", "share of torch's best", "share of the peak"]
    ]
    for n, k in SHAPES:
        x, weight = torch.randn(MANY, k), torch.randn(n, k)
        x16, weight16 = x.bfloat16(), weight.bfloat16()
        for name in names:
            ours = packed(quantized(n, k, FORMATS[name]))
            took = best(
                rounds, partial(linear, x16, ours), partial(F.linear, x16, weight16), partial(F.linear, x, weight)
            )  # fmt: skip
            rate, bf16, fp32 = (2 * MANY * n * k / seconds / 1e9 for seconds in took)
            shares = share(rate, max(bf16, fp32)), share(rate, peak)
            rows.append([f"{k} → {n}, {name}", number(rate), number(bf16), number(fp32), *shares])
    return rows


def decode(names: Sequence[str], limits: Floors, rounds: int) -> list[list[str]]:
    """Measures matrix products of few rows: the rate in GB/s at which weights are read, and its share of the memory
    bandwidth."""
    rows = [["GB/s of weights", *(title for t in FEW for title in (f"{t} rows", "share"))]]
    for n, k in SHAPES:
        for name in names:
            weight = quantized(n, k, FORMATS[name])
            first = packed(weight)
            size = first.cpu.nbytes if first.cpu else n * k * 2
            weights = [first, *(packed(weight) for _ in range(SPREAD // size))]
            cells = []
            for t in FEW:
                x = torch.randn(t, k).bfloat16()
                [seconds] = best(rounds, partial(_multiply, x, weights))
                rate = size * len(weights) / seconds / 1e9
                cells += [number(rate), share(rate, limits.read_gb_s)]
            rows.append([f"{k} → {n}, {name}", *cells])
    return rows


def _multiply(x: Tensor, weights: Sequence[PackedLinear]) -> None:
    for weight in weights:
        linear(x, weight)


def mixture(names: Sequence[str], limits: Floors, rounds: int) -> list[list[str]]:
    """Measures a layer of experts: the rate in GB/s at which the chosen experts' weights are read, and its share of the
    memory bandwidth."""
    rows = [["experts, GB/s of chosen weights", *(title for t in FEW for title in (f"{t} rows", "share"))]]
    for name in names:
        parts = [repeat([quantized(n, k, FORMATS[name])]) for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
        gate_up, down = (
            pack_experts(islice(part, EXPERTS), count=EXPERTS, dtype=torch.bfloat16, invariant=True) for part in parts
        )
        router, loads = pack(torch.randn(EXPERTS, HIDDEN).bfloat16(), invariant=True), torch.zeros(EXPERTS).long()
        layer = Experts(router, gate_up, down, loads)
        cells = []
        for t in FEW:
            steps, chosen = torch.randn(16, t, HIDDEN).bfloat16(), 0
            for x in steps:
                loads.zero_()
                experts(x, layer, CHOSEN, "silu", normalized=True)
                chosen += int((loads > 0).sum())
            [seconds] = best(rounds, partial(_choose, steps, layer))
            rate = (gate_up.nbytes + down.nbytes) / EXPERTS * chosen / seconds / 1e9
            cells += [number(rate), share(rate, limits.read_gb_s)]
        rows.append([f"{EXPERTS} of {HIDDEN} → {INNER} → {HIDDEN}, {name}", *cells])
    return rows


def _choose(steps: Tensor, layer: Experts) -> None:
    for x in steps:
        experts(x, layer, CHOSEN, "silu", normalized=True)


def attention(limits: Floors, rounds: int, page: int = 32) -> list[list[str]]:
    """Measures decode attention over shuffled pages: the rate in GB/s at which K/V is read, and its share of the memory
    bandwidth."""
    heads, kv_heads, d = 16, 8, 128
    rows = [["decode attention, sequences x context", "GB/s", "share"]]
    for sequences, length in ((8, 128), (8, 1024), (32, 160), (32, 1024), (1, 8192)):
        each = -(-length // page)
        pages = (torch.randperm(sequences * each) + 1).int().view(sequences, each)
        caches = [[torch.randn(sequences * each + 1, page, kv_heads, d).bfloat16() for _ in "kv"]]
        size = 2 * sequences * length * kv_heads * d * 2
        caches += [[part.clone() for part in caches[0]] for _ in range(SPREAD // size)]
        q, starts = torch.randn(sequences, heads, d).bfloat16(), torch.arange(sequences + 1).int()
        lengths = torch.full((sequences,), length).int()

        def attend(
            q: Tensor = q, caches: list[list[Tensor]] = caches, starts: Tensor = starts, lengths: Tensor = lengths,
            pages: Tensor = pages,
        ) -> None:  # fmt: skip
            for k, v in caches:
                attention_native.attention(q, k, v, starts, lengths, pages, scale=d**-0.5, window=0)

        [seconds] = best(rounds, attend)
        rate = size * len(caches) / seconds / 1e9
        rows.append([f"{sequences} x {length}", number(rate), share(rate, limits.read_gb_s)])
    return rows


def rowwise(rounds: int) -> list[list[str]]:
    """Measures row-wise operations (norm, activation): the rate in GB/s, and how much longer plain torch takes."""
    table = [["GB/s", "residual + norm", "torch ÷ Sluice, in time", "act_and_mul", "torch ÷ Sluice, in time"]]
    for t in (1, 32, 1024):
        x, residual, wide = (torch.randn(t, n).bfloat16() for n in (1024, 1024, 6144))
        weight = torch.ones(1024, dtype=torch.bfloat16)
        normed = (x, residual, weight, 1e-6)
        norms = best(rounds, partial(norm_native.add_rms_norm, *normed), partial(norm.add_rms_norm_torch, *normed))
        gates = best(
            rounds, partial(activation.act_and_mul, wide, "silu"), partial(act_and_mul.act_and_mul_torch, wide, "silu")
        )  # fmt: skip
        rates = 4 * x.nbytes / norms[0] / 1e9, 1.5 * wide.nbytes / gates[0] / 1e9
        ratios = norms[1] / norms[0], gates[1] / gates[0]
        table.append([f"{t} rows", number(rates[0]), number(ratios[0]), number(rates[1]), number(ratios[1])])
    return table


def share(rate: float, limit: float) -> str:
    return f"{rate / limit:.0%}"


SECTIONS: dict[str, Callable[[Sequence[str], Floors, int], list[list[str]]]] = {
    "products": products,
    "decode": decode,
    "experts": mixture,
    "attention": lambda names, limits, rounds: attention(limits, rounds),
    "rows": lambda names, limits, rounds: rowwise(rounds),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=positive_int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive_int, default=8, help="the best of so many counts")
    parser.add_argument("--formats", type=comma_separated(FORMATS, every=FORMATS), default="all")
    parser.add_argument("--sections", type=comma_separated(SECTIONS, every=SECTIONS), default="all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not c_library.available(torch.bfloat16):
        raise SystemExit("the C library does not run here")
    for section in args.sections:
        limits = roofline.measure(args.threads)
        assert limits is not None
        bf16 = "" if limits.bf16_gflop_s is None else f", bf16 products {limits.bf16_gflop_s:.0f} GFLOP/s"
        print(
            f"\n{section}, {c_library.tier()}, {args.threads} threads: reading memory {limits.read_gb_s:.1f} GB/s, "
            f"fp32 multiply-adds {limits.fp32_gflop_s:.0f} GFLOP/s{bf16}\n",
            flush=True,
        )
        print(aligned(SECTIONS[section](args.formats, limits, args.rounds)), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
