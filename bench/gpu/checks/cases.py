"""Inputs for each kernel, fresh every time, and what its fp32 twin makes of them upcast. Odd sizes, all page sizes."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.checks.cases_kv import all_heads, attentions, rotaries, writes
from bench.gpu.checks.random_inputs import EPS, Case, Fresh, Tensors
from bench.gpu.context import Place
from worker.kernels.act_and_mul import Activation, act_and_mul, act_and_mul_torch
from worker.kernels.linear import gated_linear, linear, pack, pack_quantized
from worker.kernels.norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from worker.kernels.params import PlainParams, Stages
from worker.kernels.quantize import linear_quantized_torch, quantize
from worker.kernels.sample import sample_plain

Kind = tuple[float, int, float, float]  # temperature, top-k, top-p, min-p


def _norms(place: Place) -> Iterator[Case]:
    fresh = Fresh(place)
    sizes = ((1, 64), (3, 1152), (17, 2048), (5, 2560), (33, 3072), (257, 4096), (2, 5000))
    for (rows, size), offset in place.some(product(sizes, (False, True))):
        yield _norm(fresh(rows, size), fresh(size), offset)
        yield _add_norm(fresh(rows, size), fresh(rows, size), fresh(size), offset)
    yield _norm(fresh(9, 48, 128)[:, 32:40], fresh(128), False)


def _norm(x: Tensor, weight: Tensor, offset: bool) -> Case:
    return Case(
        f"rms_norm {tuple(x.shape)}, offset {offset}",
        lambda: (rms_norm(x, weight, EPS, offset=offset),),
        lambda: (rms_norm_torch(x.float(), weight.float(), EPS, offset=offset),),
    )


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, offset: bool) -> Case:
    return Case(
        f"add_rms_norm {tuple(x.shape)}, offset {offset}",
        lambda: add_rms_norm(x, residual, weight, EPS, offset=offset),
        lambda: add_rms_norm_torch(x.float(), residual.float(), weight.float(), EPS, offset=offset),
    )


def _gates(place: Place) -> Iterator[Case]:
    fresh = Fresh(place)
    kinds: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for (rows, size), kind in place.some(product(((1, 64), (3, 6912), (33, 8192), (257, 1000)), kinds)):
        yield _gate(fresh(rows, 2 * size), kind)


def _gate(x: Tensor, kind: Activation) -> Case:
    return Case(
        f"gate {tuple(x.shape)} {kind}", lambda: (act_and_mul(x, kind),), lambda: (act_and_mul_torch(x.float(), kind),)
    )


def _linears(place: Place) -> Iterator[Case]:
    fresh = Fresh(place)
    shapes = ((1536, 1152), (1000, 520), (5120, 3072))
    for rows, (n, k) in place.some(product((1, 3, 16, 33, 64, 65, 130, 257), shapes)):
        weight = fresh(n, k, dtype=torch.float32).mul_(k**-0.5).to(place.dtype)
        bias = fresh(n) if rows % 2 else None
        yield _linear(fresh(rows, k), weight, bias, invariant=True)
        yield _linear(fresh(rows, k), weight, bias, invariant=False)


def _quantized(place: Place) -> Iterator[Case]:
    """Weights of eight bits, in every kind of tile; and each byte that there is, exactly."""
    fresh = Fresh(place)
    shapes = ((1536, 1152), (1000, 520), (5120, 3072))
    for at, (rows, (n, k)) in enumerate(place.some(product((1, 3, 16, 33, 64, 65, 130, 257), shapes))):
        eight = quantize(fresh(n, k, dtype=torch.float32).mul_(k**-0.5), "fp8" if at % 2 else "int8")
        bias = fresh(n) if rows % 2 else None
        for dynamic in (False, True) if place.cuda else (False,):  # elsewhere activations stay as they are
            yield _eight_bits(fresh(rows, k), *eight, bias, dynamic)
            yield _eight_bits_gated(fresh(rows, k), *eight, "gelu_tanh" if at % 2 else "silu", dynamic)
    every = torch.arange(256, dtype=torch.uint8, device=place.device)
    numbers = torch.where(every % 128 == 127, torch.zeros_like(every), every)  # two bytes are none in fp8
    for bytes_, format in ((every, torch.int8), (numbers, torch.float8_e4m3fn)):
        one = torch.eye(256, dtype=place.dtype, device=place.device)
        scale = torch.ones(64, device=place.device)
        yield _eight_bits(one, bytes_.view(format).repeat(64, 1), scale, None, False)


def _eight_bits(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Case:
    ready = pack_quantized(values, scale, bias, dtype=x.dtype, invariant=True, dynamic=dynamic)
    return Case(
        f"linear {tuple(x.shape)} x {tuple(values.shape)} of {values.dtype}, dynamic {dynamic}",
        lambda: (linear(x, ready),),
        lambda: (linear_quantized_torch(x.float(), values, scale, bias, dynamic=dynamic),),
    )


def _eight_bits_gated(x: Tensor, values: Tensor, scale: Tensor, kind: Activation, dynamic: bool) -> Case:
    ready = pack_quantized(values, scale, dtype=x.dtype, invariant=True, dynamic=dynamic)
    return Case(
        f"gated_linear {tuple(x.shape)} x {tuple(values.shape)} of {values.dtype}, {kind}, dynamic {dynamic}",
        lambda: (gated_linear(x, ready, kind),),
        lambda: (act_and_mul_torch(linear_quantized_torch(x.float(), values, scale, None, dynamic=dynamic), kind),),
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool) -> Case:
    ready = pack(weight, bias, invariant=invariant)
    return Case(
        f"linear {tuple(x.shape)} x {tuple(weight.shape)}, invariant {invariant}",
        lambda: (linear(x, ready),),
        lambda: (F.linear(x.float(), weight.float(), None if bias is None else bias.float()),),
    )


def _fused(place: Place) -> Iterator[Case]:
    """Products whose reader finishes them: the gate, the sum of their parts, the norms behind it."""
    fresh = Fresh(place)
    rows, sizes = (1, 5, 33, 64, 130), ((1152, 6912), (520, 1000), (3072, 8192))
    for at, (count, (hidden, inner)) in enumerate(place.some(product(rows, sizes))):
        up = fresh(2 * inner, hidden, dtype=torch.float32).mul_(hidden**-0.5).to(place.dtype)
        down = fresh(hidden, inner, dtype=torch.float32).mul_(inner**-0.5).to(place.dtype)
        yield _gated(fresh(count, hidden), up, "gelu_tanh" if at % 2 else "silu")
        norms = fresh(hidden), fresh(hidden) if at % 2 else None
        yield _added(fresh(count, inner), down, fresh(count, hidden), *norms)


def _gated(x: Tensor, weight: Tensor, kind: Activation) -> Case:
    ready = pack(weight, invariant=True)
    return Case(
        f"gated_linear {tuple(x.shape)} x {tuple(weight.shape)}, {kind}",
        lambda: (gated_linear(x, ready, kind),),
        lambda: (act_and_mul_torch(F.linear(x.float(), weight.float()), kind),),
    )


def _added(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, after: Tensor | None) -> Case:
    ready, wide_after = pack(weight, invariant=True), None if after is None else after.float()

    def want() -> Tensors:
        y = F.linear(x.float(), weight.float())
        return add_rms_norm_torch(y, residual.float(), norm.float(), EPS, x_norm=wide_after)

    return Case(
        f"linear in parts {tuple(x.shape)} x {tuple(weight.shape)}, added and normed, after {after is not None}",
        lambda: add_rms_norm(linear(x, ready, split_k=True), residual, norm, EPS, x_norm=after),
        want,
    )


def _samples(place: Place) -> Iterator[Case]:
    """Ids: what the device draws and what the CPU draws from the same logits."""
    fresh = Fresh(place)
    kinds: tuple[Kind, ...] = ((0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.0, 50, 0.9, 0.01))
    for (rows, vocab), kind in place.some(product(((1, 2048), (5, 32_000), (33, 128_256), (2, 262_144)), kinds)):
        yield _sample(fresh(rows, vocab, dtype=torch.float32).mul_(3), kind)


def wanted(rows: int, kind: Kind, device: torch.device | str = "cpu") -> tuple[PlainParams, Stages]:
    """The same for every row."""
    temperature, top_k, top_p, min_p = kind

    def column(value: float) -> Tensor:
        return torch.full((rows,), value, device=device)

    where = torch.arange(rows, device=device)
    greedy = not temperature
    stages = Stages(greedy, greedy, any_top_k=top_k > 0, any_top_p=top_p < 1, any_min_p=min_p > 0)
    columns = column(temperature), column(top_k).long(), column(top_p), column(min_p)
    return PlainParams(*columns, where, where + 5), stages


def _sample(logits: Tensor, kind: Kind) -> Case:
    here, there = wanted(len(logits), kind), wanted(len(logits), kind, logits.device)
    return Case(
        f"sample {tuple(logits.shape)}, temperature {kind[0]:g}, top_p {kind[2]:g}",
        lambda: (sample_plain(logits, *there),),
        lambda: (sample_plain(logits.cpu(), *here),),
    )


CASES: Mapping[str, Callable[[Place], Iterator[Case]]] = {
    "norm": _norms, "rotary": rotaries, "write": writes, "heads": all_heads, "attention": attentions,
    "gate": _gates, "linear": _linears, "quantized": _quantized, "fused": _fused, "sample": _samples,
}  # fmt: skip
