"""Test cases for each kernel: random inputs, and the result of the kernel's PyTorch form in fp32.

The sizes include odd ones, and all page sizes occur.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.checks.cases_experts import experts_cases
from bench.gpu.checks.cases_few_bits import few_bits_cases
from bench.gpu.checks.cases_kv import attention_cases, qkv_rope_write_cases, rotary_cases, store_kv_cases
from bench.gpu.checks.cases_recurrent import recurrent_cases
from bench.gpu.checks.random_inputs import EPS, Case, RandomTensors, Tensors
from bench.gpu.environment import Environment
from worker.ops.activation import act_and_mul
from worker.ops.activation.reference import GATED, act_and_mul_torch
from worker.ops.linear import gated_linear, linear
from worker.ops.linear.packed import pack, pack_quantized
from worker.ops.norm import add_rms_norm, rms_norm
from worker.ops.norm.reference import add_rms_norm_torch, rms_norm_torch
from worker.ops.quantized_weight import linear_quantized_torch, quantize
from worker.ops.sampling import sample_plain
from worker.ops.sampling.reference import PlainParams, Stages, wrong_draws
from worker.spec import Activation

Kind = tuple[float, int, float, float]  # temperature, top-k, top-p, min-p


def _norm_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env)
    sizes = ((1, 64), (3, 1152), (17, 2048), (5, 2560), (33, 3072), (257, 4096), (2, 5000))
    for (rows, size), offset in env.sample(product(sizes, (False, True))):
        yield _norm(random(rows, size), random(size), offset)
        yield _add_norm(random(rows, size), random(rows, size), random(size), offset)
    yield _norm(random(9, 48, 128)[:, 32:40], random(128), False)


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


def _act_and_mul_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env)
    for (rows, size), kind in env.sample(product(((1, 64), (3, 6912), (33, 8192), (257, 1000)), GATED)):
        yield _act_and_mul(random(rows, 2 * size), kind)


def _act_and_mul(x: Tensor, kind: Activation) -> Case:
    return Case(
        f"act_and_mul {tuple(x.shape)} {kind}",
        lambda: (act_and_mul(x, kind),),
        lambda: (act_and_mul_torch(x.float(), kind),),
    )


def _linear_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env)
    shapes = ((1536, 1152), (1000, 520), (5120, 3072))
    for rows, (n, k) in env.sample(product((1, 3, 16, 33, 64, 65, 130, 257), shapes)):
        weight = random(n, k, dtype=torch.float32).mul_(k**-0.5).to(env.dtype)
        bias = random(n) if rows % 2 else None
        yield _linear(random(rows, k), weight, bias, invariant=True)
        yield _linear(random(rows, k), weight, bias, invariant=False)


def _quantized_cases(env: Environment) -> Iterator[Case]:
    """Yields products with eight-bit weights in every kind of tile, and products with every possible byte value."""
    random = RandomTensors(env)
    shapes = ((1536, 1152), (1000, 520), (5120, 3072))
    for at, (rows, (n, k)) in enumerate(env.sample(product((1, 3, 16, 33, 64, 65, 130, 257), shapes))):
        quantized = quantize(random(n, k, dtype=torch.float32).mul_(k**-0.5), "fp8" if at % 2 else "int8")
        bias = random(n) if rows % 2 else None
        for dynamic in (False, True) if env.cuda else (False,):  # on a CPU, activations are not quantized
            yield _eight_bits(random(rows, k), *quantized, bias, dynamic)
            yield _eight_bits_gated(random(rows, k), *quantized, "gelu_tanh" if at % 2 else "silu", dynamic)
    every = torch.arange(256, dtype=torch.uint8, device=env.device)
    numbers = torch.where(every % 128 == 127, torch.zeros_like(every), every)  # two bytes are NaN in fp8
    for bytes_, format in ((every, torch.int8), (numbers, torch.float8_e4m3fn)):
        one = torch.eye(256, dtype=env.dtype, device=env.device)
        scale = torch.ones(64, device=env.device)
        yield _eight_bits(one, bytes_.view(format).repeat(64, 1), scale, None, False)


def _eight_bits(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Case:
    packed = pack_quantized(values, scale, bias, dtype=x.dtype, invariant=True, dynamic=dynamic)
    return Case(
        f"linear {tuple(x.shape)} x {tuple(values.shape)} of {values.dtype}, dynamic {dynamic}",
        lambda: (linear(x, packed),),
        lambda: (linear_quantized_torch(x.float(), values, scale, bias, dynamic=dynamic),),
    )


def _eight_bits_gated(x: Tensor, values: Tensor, scale: Tensor, kind: Activation, dynamic: bool) -> Case:
    packed = pack_quantized(values, scale, dtype=x.dtype, invariant=True, dynamic=dynamic)
    return Case(
        f"gated_linear {tuple(x.shape)} x {tuple(values.shape)} of {values.dtype}, {kind}, dynamic {dynamic}",
        lambda: (gated_linear(x, packed, kind),),
        lambda: (act_and_mul_torch(linear_quantized_torch(x.float(), values, scale, None, dynamic=dynamic), kind),),
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool) -> Case:
    packed = pack(weight, bias, invariant=invariant)
    return Case(
        f"linear {tuple(x.shape)} x {tuple(weight.shape)}, invariant {invariant}",
        lambda: (linear(x, packed),),
        lambda: (F.linear(x.float(), weight.float(), None if bias is None else bias.float()),),
    )


def _fused_cases(env: Environment) -> Iterator[Case]:
    """Yields matrix products that are fused with act_and_mul, and products whose partial sums the next norm adds."""
    random = RandomTensors(env)
    rows, sizes = (1, 5, 33, 64, 130), ((1152, 6912), (520, 1000), (3072, 8192))
    for at, (count, (hidden, inner)) in enumerate(env.sample(product(rows, sizes))):
        up = random(2 * inner, hidden, dtype=torch.float32).mul_(hidden**-0.5).to(env.dtype)
        down = random(hidden, inner, dtype=torch.float32).mul_(inner**-0.5).to(env.dtype)
        yield _gated(random(count, hidden), up, "gelu_tanh" if at % 2 else "silu")
        norms = random(hidden), random(hidden) if at % 2 else None
        yield _add_rms_norm_after_linear(random(count, inner), down, random(count, hidden), *norms)


def _gated(x: Tensor, weight: Tensor, kind: Activation) -> Case:
    packed = pack(weight, invariant=True)
    return Case(
        f"gated_linear {tuple(x.shape)} x {tuple(weight.shape)}, {kind}",
        lambda: (gated_linear(x, packed, kind),),
        lambda: (act_and_mul_torch(F.linear(x.float(), weight.float()), kind),),
    )


def _add_rms_norm_after_linear(
    x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, x_norm: Tensor | None
) -> Case:
    packed, x_norm_fp32 = pack(weight, invariant=True), None if x_norm is None else x_norm.float()

    def want() -> Tensors:
        y = F.linear(x.float(), weight.float())
        return add_rms_norm_torch(y, residual.float(), norm.float(), EPS, x_norm=x_norm_fp32)

    return Case(
        f"add_rms_norm of split-K linear {tuple(x.shape)} x {tuple(weight.shape)}, x_norm {x_norm is not None}",
        lambda: add_rms_norm(linear(x, packed, split_k=True), residual, norm, EPS, x_norm=x_norm),
        want,
    )


def _sample_cases(env: Environment) -> Iterator[Case]:
    """Yields logits and sampling parameters for which the device and the CPU must sample the same ids.

    Ids may differ where the drawn number is so close to a token's cumulative probability that exp's last bit decides.
    """
    random = RandomTensors(env)
    kinds: tuple[Kind, ...] = ((0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.0, 50, 0.9, 0.01))
    for (rows, vocab), kind in env.sample(product(((1, 2048), (5, 32_000), (33, 128_256), (2, 262_144)), kinds)):
        yield _sample(random(rows, vocab, dtype=torch.float32).mul_(3), kind)


def sampling_params(rows: int, kind: Kind, device: torch.device | str = "cpu") -> tuple[PlainParams, Stages]:
    """Returns sampling parameters with the same values for every row, and which stages of sampling they need."""
    temperature, top_k, top_p, min_p = kind

    def column(value: float) -> Tensor:
        return torch.full((rows,), value, device=device)

    where = torch.arange(rows, device=device)
    greedy = not temperature
    stages = Stages(greedy, greedy, any_top_k=top_k > 0, any_top_p=top_p < 1, any_min_p=min_p > 0)
    columns = column(temperature), column(top_k).long(), column(top_p), column(min_p)
    return PlainParams(*columns, where, where + 5), stages


def _sample(logits: Tensor, kind: Kind) -> Case:
    here, there = sampling_params(len(logits), kind), sampling_params(len(logits), kind, logits.device)
    return Case(
        f"sample {tuple(logits.shape)}, temperature {kind[0]:g}, top_p {kind[2]:g}",
        lambda: (sample_plain(logits, *there),),
        lambda: (sample_plain(logits.cpu(), *here),),
        lambda got, want: wrong_draws(logits.cpu(), *here, got[0].cpu(), want[0]),
    )


CASES: Mapping[str, Callable[[Environment], Iterator[Case]]] = {
    "norm": _norm_cases, "rotary": rotary_cases, "store_kv": store_kv_cases, "qkv_rope_write": qkv_rope_write_cases,
    "attention": attention_cases, "act_and_mul": _act_and_mul_cases, "recurrent": recurrent_cases,
    "linear": _linear_cases,
    "quantized": _quantized_cases, "low_bit": few_bits_cases, "fused": _fused_cases, "experts": experts_cases,
    "sample": _sample_cases,
}  # fmt: skip
