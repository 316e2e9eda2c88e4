"""Inputs for each kernel, fresh every time, and what its fp32 twin makes of them upcast. Odd sizes, all page sizes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from bench.gpu.place import Place
from bench.gpu.steps import last, packed, sequences
from worker.kernels.attention import attention, attention_torch
from worker.kernels.gate import Activation, gate, gate_torch
from worker.kernels.heads import heads
from worker.kernels.linear import gated_linear, linear, linear_torch, pack, pack_quantized
from worker.kernels.norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from worker.kernels.quantize import linear_quantized_torch, quantize
from worker.kernels.rotary import rotary, rotary_torch
from worker.kernels.sample import PlainParams, Stages, sample_plain
from worker.kernels.write import write_kv, write_kv_torch

EPS = 1e-6
HEADS = ((24, 8, 128, 16), (32, 8, 64, 64), (4, 1, 256, 1), (6, 2, 96, 256), (32, 8, 128, 32))  # Hq, Hk, D, page size
MIXED = ((1, 1), (1, 37), (5, 5), (1, 513), (17, 640), (3, 99), (1, 2), (130, 1100))  # rows, keys
MIXES = (MIXED, ((1, 1500),), tuple((1, 64 + 7 * i) for i in range(64)))
WINDOWS = (0, 24, 512)
Tensors = tuple[Tensor, ...]
Kind = tuple[float, int, float, float]  # temperature, top-k, top-p, min-p


@dataclass(frozen=True, slots=True)
class Case:
    """`got` in the format under test, `want` from its twin in fp32; tensors of the same shapes."""

    label: str
    got: Callable[[], Tensors]
    want: Callable[[], Tensors]


class Fresh:
    """Random tensors on one device, in one format unless said."""

    def __init__(self, place: Place, dtype: torch.dtype | None = None) -> None:
        self._generator, self._dtype, self.device = place.generator(), dtype or place.dtype, place.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(*shape, generator=self._generator, device=self.device)
        return made.to(dtype or self._dtype)

    def ids(self, count: int, below: int) -> Tensor:
        """Distinct ones, [count] int64."""
        return torch.randperm(below, generator=self._generator, device=self.device)[:count]


def _cached(place: Place) -> torch.dtype:
    """The CPU's library may lay out K/V of bfloat16 in an order of its own."""
    return place.dtype if place.cuda else torch.float32


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


def _rotaries(place: Place) -> Iterator[Case]:
    fresh = Fresh(place)
    for tokens, (q_heads, kv_heads, dim, _) in zip((1, 7, 300, 16, 65), HEADS, strict=True):
        both = fresh(tokens, q_heads + kv_heads, dim)  # strided, as the fused projection leaves them
        cos, sin = fresh(512, dim, dtype=torch.float32).cos(), fresh(512, dim, dtype=torch.float32).sin()
        yield _rotary(both[:, :q_heads], both[:, q_heads:], cos, sin, fresh.ids(tokens, 512))


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Case:
    return Case(
        f"rotary {tuple(q.shape)}",
        lambda: rotary(q, k, cos, sin, positions),
        lambda: rotary_torch(q.float(), k.float(), cos, sin, positions),
    )


def _writes(place: Place) -> Iterator[Case]:
    fresh = Fresh(place, _cached(place))
    for tokens, (_, kv_heads, dim, page) in zip((1, 7, 256, 33, 128), HEADS, strict=True):
        pool = -(-2 * tokens // page) + 1
        cache = fresh(pool, page, kv_heads, dim), fresh(pool, page, kv_heads, dim)
        both = fresh(tokens, 2 * kv_heads, dim)
        yield _write(both[:, :kv_heads], both[:, kv_heads:], cache, fresh.ids(tokens, pool * page))


def _write(k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor) -> Case:
    def after(write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None], wide: bool) -> Tensors:
        one, other = (part.float() if wide else part.clone() for part in cache)
        write(k, v, one, other, slots)
        return one, other

    return Case(f"write {tuple(k.shape)}", lambda: after(write_kv, False), lambda: after(write_kv_torch, True))


def _all_heads(place: Place) -> Iterator[Case]:
    fresh = Fresh(place, _cached(place))
    for tokens, (q_heads, kv_heads, dim, page) in zip((1, 7, 300, 16, 65), HEADS, strict=True):
        for normed in (False, True):
            pool = -(-2 * tokens // page) + 1
            qkv = fresh(tokens, (q_heads + 2 * kv_heads) * dim)
            cache = fresh(pool, page, kv_heads, dim), fresh(pool, page, kv_heads, dim)
            tables = fresh(512, dim, dtype=torch.float32).cos(), fresh(512, dim, dtype=torch.float32).sin()
            norms = (fresh(dim), fresh(dim)) if normed else None
            yield _heads(qkv, cache, tables, fresh.ids(tokens, 512), fresh.ids(tokens, pool * page), norms)


def _heads(
    qkv: Tensor,
    cache: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
) -> Case:
    kv_heads, dim = cache[0].shape[2:]

    def got() -> Tensors:
        k, v = (part.clone() for part in cache)
        q_norm, k_norm = norms or (None, None)
        q = heads(
            qkv, k, v, *tables, positions, slots,
            q_norm=q_norm, k_norm=k_norm, eps=EPS, offset=False, dtype=qkv.dtype,
        )  # fmt: skip
        return q, k, v

    def want() -> Tensors:
        parts = qkv.float().view(len(qkv), -1, dim)
        q, k, v = parts.split_with_sizes([parts.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = (rms_norm_torch(x, w.float(), EPS) for x, w in zip((q, k), norms, strict=True))
        q, k = rotary_torch(q, k, *tables, positions)
        cache_k, cache_v = (part.float() for part in cache)
        write_kv_torch(k, v, cache_k, cache_v, slots)
        return q, cache_k, cache_v

    return Case(f"heads {len(qkv)} x {kv_heads} x {dim}, normed {norms is not None}", got, want)


def _attentions(place: Place) -> Iterator[Case]:
    fresh = Fresh(place, _cached(place))
    for shape, mix, window in place.some(product(HEADS, MIXES, WINDOWS)):
        yield _attention(fresh, shape, mix, window, place.seed)


def _attention(
    fresh: Fresh, shape: tuple[int, int, int, int], mix: tuple[tuple[int, int], ...], window: int, seed: int
) -> Case:
    """What no sequence owns is NaN."""
    q_heads, kv_heads, dim, page = shape
    made, pool = sequences((keys for _, keys in mix), page, 100, seed)
    step = packed([last(one, rows) for one, (rows, _) in zip(made, mix, strict=True)], page, fresh.device)
    whole = packed([last(one, len(one.tokens)) for one in made], page, fresh.device)
    q = fresh(len(step.tokens), q_heads, dim)
    caches = []
    for _ in "kv":
        cache = torch.full((pool, page, kv_heads, dim), torch.nan, dtype=q.dtype, device=fresh.device)
        cache.flatten(0, 1)[whole.slots] = fresh(len(whole.slots), kv_heads, dim)
        caches.append(cache)
    wide = [cache.float() for cache in caches]
    scale = dim**-0.5
    return Case(
        f"attention {q_heads}/{kv_heads} heads of {dim}, page {page}, {len(mix)} sequences, window {window}",
        lambda: (
            attention(
                q, caches[0], caches[1], step.starts, step.kv_lens, step.pages, step.max_kv,
                scale=scale, window=window,
            ),
        ),
        lambda: (
            attention_torch(
                q.float(), wide[0], wide[1], step.starts, step.kv_lens, step.pages, scale=scale, window=window
            ),
        ),
    )  # fmt: skip


def _gates(place: Place) -> Iterator[Case]:
    fresh = Fresh(place)
    kinds: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for (rows, size), kind in place.some(product(((1, 64), (3, 6912), (33, 8192), (257, 1000)), kinds)):
        yield _gate(fresh(rows, 2 * size), kind)


def _gate(x: Tensor, kind: Activation) -> Case:
    return Case(f"gate {tuple(x.shape)} {kind}", lambda: (gate(x, kind),), lambda: (gate_torch(x.float(), kind),))


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
        yield _eight_bits(fresh(rows, k), *eight, bias, place.dtype)
        yield _eight_bits_gated(fresh(rows, k), *eight, "gelu_tanh" if at % 2 else "silu", place.dtype)
    every = torch.arange(256, dtype=torch.uint8, device=place.device)
    numbers = torch.where(every % 128 == 127, torch.zeros_like(every), every)  # two bytes are none in fp8
    for bytes_, format in ((every, torch.int8), (numbers, torch.float8_e4m3fn)):
        one = torch.eye(256, dtype=place.dtype, device=place.device)
        scale = torch.ones(64, device=place.device)
        yield _eight_bits(one, bytes_.view(format).repeat(64, 1), scale, None, place.dtype)


def _eight_bits(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Case:
    ready = pack_quantized(values, scale, bias, dtype=dtype, invariant=True)
    return Case(
        f"linear {tuple(x.shape)} x {tuple(values.shape)} of {values.dtype}",
        lambda: (linear(x, ready),),
        lambda: (linear_quantized_torch(x.float(), values, scale, bias),),
    )


def _eight_bits_gated(x: Tensor, values: Tensor, scale: Tensor, kind: Activation, dtype: torch.dtype) -> Case:
    ready = pack_quantized(values, scale, dtype=dtype, invariant=True)
    return Case(
        f"gated_linear {tuple(x.shape)} x {tuple(values.shape)} of {values.dtype}, {kind}",
        lambda: (gated_linear(x, ready, kind),),
        lambda: (gate_torch(linear_quantized_torch(x.float(), values, scale, None), kind),),
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool) -> Case:
    ready = pack(weight, bias, invariant=invariant)
    return Case(
        f"linear {tuple(x.shape)} x {tuple(weight.shape)}, invariant {invariant}",
        lambda: (linear(x, ready),),
        lambda: (linear_torch(x.float(), weight.float(), None if bias is None else bias.float()),),
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
        lambda: (gate_torch(linear_torch(x.float(), weight.float(), None), kind),),
    )


def _added(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, after: Tensor | None) -> Case:
    ready, wide_after = pack(weight, invariant=True), None if after is None else after.float()

    def want() -> Tensors:
        y = linear_torch(x.float(), weight.float(), None)
        return add_rms_norm_torch(y, residual.float(), norm.float(), EPS, after=wide_after)

    return Case(
        f"linear in parts {tuple(x.shape)} x {tuple(weight.shape)}, added and normed, after {after is not None}",
        lambda: add_rms_norm(linear(x, ready, terms=True), residual, norm, EPS, after=after),
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
    "norm": _norms, "rotary": _rotaries, "write": _writes, "heads": _all_heads, "attention": _attentions,
    "gate": _gates, "linear": _linears, "quantized": _quantized, "fused": _fused, "sample": _samples,
}  # fmt: skip
