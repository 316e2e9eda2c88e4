"""Cases of what reads and writes keys and values: rotation, write, both with the norms before, attention."""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from bench.gpu.checks.random_inputs import EPS, Case, Fresh, Tensors
from bench.gpu.context import Place
from bench.gpu.setup.steps import last, packed, sequences
from worker.kernels.attention import attention, attention_torch
from worker.kernels.norm import rms_norm_torch
from worker.kernels.qkv_rope_write import qkv_rope_write
from worker.kernels.rotary import rotary, rotary_torch
from worker.kernels.store_kv import store_kv, store_kv_torch

HEADS = ((24, 8, 128, 16), (32, 8, 64, 64), (4, 1, 256, 1), (6, 2, 96, 256), (32, 8, 128, 32))  # Hq, Hk, D, page size
MIXED = ((1, 1), (1, 37), (5, 5), (1, 513), (17, 640), (3, 99), (1, 2), (130, 1100))  # rows, keys
MIXES = (MIXED, ((1, 1500),), tuple((1, 64 + 7 * i) for i in range(64)))
WINDOWS = (0, 24, 512)


def _cached(place: Place) -> torch.dtype:
    """The CPU's library may lay out K/V of bfloat16 in an order of its own."""
    return place.dtype if place.cuda else torch.float32


def rotaries(place: Place) -> Iterator[Case]:
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


def writes(place: Place) -> Iterator[Case]:
    fresh = Fresh(place, _cached(place))
    for tokens, (_, kv_heads, dim, page) in zip((1, 7, 256, 33, 128), HEADS, strict=True):
        pool = -(-2 * tokens // page) + 1
        cache = fresh(pool, page, kv_heads, dim), fresh(pool, page, kv_heads, dim)
        both = fresh(tokens, 2 * kv_heads, dim)
        slots = fresh.ids(tokens, pool * page)
        yield _write(both[:, :kv_heads], both[:, kv_heads:], cache, slots)
        eight = cache[0].to(torch.float8_e4m3fn), cache[1].to(torch.float8_e4m3fn)
        yield _write(both[:, :kv_heads], both[:, kv_heads:], eight, slots)


def _write(k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor) -> Case:
    def after(write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]) -> Tensors:
        one, other = (part.clone() for part in cache)
        write(k, v, one, other, slots)
        return one, other

    return Case(f"write {tuple(k.shape)} as {cache[0].dtype}", lambda: after(store_kv), lambda: after(store_kv_torch))


def all_heads(place: Place) -> Iterator[Case]:
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
        q = qkv_rope_write(
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
        store_kv_torch(k, v, cache_k, cache_v, slots)
        return q, cache_k, cache_v

    return Case(f"heads {len(qkv)} x {kv_heads} x {dim}, normed {norms is not None}", got, want)


def attentions(place: Place) -> Iterator[Case]:
    fresh = Fresh(place, _cached(place))
    for shape, mix, window in place.some(product(HEADS, MIXES, WINDOWS)):
        yield _attention(fresh, shape, mix, window, place.seed)
    for shape, mix in place.some(product(HEADS, MIXES)):
        yield _attention(fresh, shape, mix, 0, place.seed, torch.float8_e4m3fn)


def _attention(
    fresh: Fresh,
    shape: tuple[int, int, int, int],
    mix: tuple[tuple[int, int], ...],
    window: int,
    seed: int,
    kept: torch.dtype | None = None,
) -> Case:
    """What no sequence owns is NaN; K/V are kept in q's format unless said."""
    q_heads, kv_heads, dim, page = shape
    made, pool = sequences((keys for _, keys in mix), page, 100, seed)
    step = packed([last(one, rows) for one, (rows, _) in zip(made, mix, strict=True)], page, fresh.device)
    whole = packed([last(one, len(one.tokens)) for one in made], page, fresh.device)
    q = fresh(len(step.token_ids), q_heads, dim)
    caches = []
    for _ in "kv":
        cache = torch.full((pool, page, kv_heads, dim), torch.nan, dtype=q.dtype, device=fresh.device)
        cache.flatten(0, 1)[whole.slot_mapping] = fresh(len(whole.slot_mapping), kv_heads, dim)
        caches.append(cache.to(kept or q.dtype))
    wide = [cache.float() for cache in caches]
    scale = dim**-0.5
    return Case(
        f"attention {shape}, {len(mix)} sequences, window {window}, {kept or q.dtype}",
        lambda: (
            attention(
                q, caches[0], caches[1], step.query_start_loc, step.seq_lens, step.page_table, step.max_kv_len,
                scale=scale, window=window,
            ),
        ),
        lambda: (
            attention_torch(
                q.float(), wide[0], wide[1], step.query_start_loc, step.seq_lens, step.page_table, step.max_kv_len,
                scale=scale, window=window,
            ),
        ),
    )  # fmt: skip
