"""Test cases for kernels that read or write keys and values: rotary, store_kv, qkv_rope_write, attention."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.gpu.checks.random_inputs import EPS, Case, RandomTensors, Tensors
from bench.gpu.environment import Environment
from bench.gpu.setup.steps import last, packed, sequences
from worker.ops.attention import attention
from worker.ops.attention.reference import attention_torch
from worker.ops.norm.reference import rms_norm_torch
from worker.ops.rope import qkv_rope_write, rotary, store_kv
from worker.ops.rope.reference import rotary_torch, store_kv_torch

HEADS = ((24, 8, 128, 16), (32, 8, 64, 64), (4, 1, 256, 1), (6, 2, 96, 256), (32, 8, 128, 32))  # Hq, Hk, D, page size
GPT_OSS_HEADS = (64, 8, 64, 32)
MIXED = ((1, 1), (1, 37), (5, 5), (1, 513), (17, 640), (3, 99), (1, 2), (130, 1100))  # rows, keys
# (rows, keys): many query rows, which select the kernel that does not split keys
PROMPTS = ((700, 900), (1, 300), (400, 400))
MIXES = (MIXED, PROMPTS, ((1, 1500),), tuple((1, 64 + 7 * i) for i in range(64)))
WINDOWS = (0, 24, 512)


def _cache_dtype(env: Environment) -> torch.dtype:
    """Returns the dtype of K/V: float32 on the CPU, because the C library may store bfloat16 values interleaved."""
    return env.dtype if env.cuda else torch.float32


def rotary_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env)
    for tokens, (q_heads, kv_heads, dim, _) in zip((1, 7, 300, 16, 65), HEADS, strict=True):
        both = random(tokens, q_heads + kv_heads, dim)  # q and k are strided slices, as of the qkv projection's output
        cos, sin = random(512, dim, dtype=torch.float32).cos(), random(512, dim, dtype=torch.float32).sin()
        yield _rotary(both[:, :q_heads], both[:, q_heads:], cos, sin, random.ids(tokens, 512))


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Case:
    return Case(
        f"rotary {tuple(q.shape)}",
        lambda: rotary(q, k, cos, sin, positions),
        lambda: rotary_torch(q.float(), k.float(), cos, sin, positions),
    )


def store_kv_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env, _cache_dtype(env))
    for tokens, (_, kv_heads, dim, page) in zip((1, 7, 256, 33, 128), HEADS, strict=True):
        pool = -(-2 * tokens // page) + 1
        cache = random(pool, page, kv_heads, dim), random(pool, page, kv_heads, dim)
        both = random(tokens, 2 * kv_heads, dim)
        slots = random.ids(tokens, pool * page)
        yield _store_kv(both[:, :kv_heads], both[:, kv_heads:], cache, slots)
        fp8_cache = cache[0].to(torch.float8_e4m3fn), cache[1].to(torch.float8_e4m3fn)
        yield _store_kv(both[:, :kv_heads], both[:, kv_heads:], fp8_cache, slots)


def _store_kv(k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor) -> Case:
    def caches_after(write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]) -> Tensors:
        one, other = (part.clone() for part in cache)
        write(k, v, one, other, slots)
        return one, other

    return Case(
        f"store_kv {tuple(k.shape)} as {cache[0].dtype}",
        lambda: caches_after(store_kv),
        lambda: caches_after(store_kv_torch),
    )


def qkv_rope_write_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env, _cache_dtype(env))
    for tokens, (q_heads, kv_heads, dim, page) in zip((1, 7, 300, 16, 65), HEADS, strict=True):
        for normed in (False, True):
            pool = -(-2 * tokens // page) + 1
            qkv = random(tokens, (q_heads + 2 * kv_heads) * dim)
            cache = random(pool, page, kv_heads, dim), random(pool, page, kv_heads, dim)
            tables = random(512, dim, dtype=torch.float32).cos(), random(512, dim, dtype=torch.float32).sin()
            norms = (random(dim), random(dim)) if normed else None
            yield _qkv_rope_write(qkv, cache, tables, random.ids(tokens, 512), random.ids(tokens, pool * page), norms)


def _qkv_rope_write(
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

    return Case(f"qkv_rope_write {len(qkv)} x {kv_heads} x {dim}, normed {norms is not None}", got, want)


def attention_cases(env: Environment) -> Iterator[Case]:
    random = RandomTensors(env, _cache_dtype(env))
    for shape, mix, window in env.sample(product((*HEADS, GPT_OSS_HEADS), MIXES, WINDOWS)):
        yield _attention(random, shape, mix, window, env.seed)
        yield _attention(random, shape, mix, window, env.seed, sinks=random(shape[0], dtype=torch.float32), softcap=2.0)
    for shape, mix in env.sample(product(HEADS, MIXES)):
        yield _attention(random, shape, mix, 0, env.seed, torch.float8_e4m3fn)


def _attention(
    random: RandomTensors,
    shape: tuple[int, int, int, int],
    mix: tuple[tuple[int, int], ...],
    window: int,
    seed: int,
    cache_dtype: torch.dtype | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> Case:
    """Returns a case of a step with several sequences. K/V slots that belong to no sequence hold NaN.

    cache_dtype: the dtype of K/V, or None for the dtype of q.
    """
    q_heads, kv_heads, dim, page = shape
    sequences_, pool = sequences((keys for _, keys in mix), page, 100, seed)
    step = packed([last(one, rows) for one, (rows, _) in zip(sequences_, mix, strict=True)], page, random.device)
    whole = packed([last(one, len(one.tokens)) for one in sequences_], page, random.device)
    q = random(len(step.token_ids), q_heads, dim)
    caches = []
    for _ in "kv":
        cache = torch.full((pool, page, kv_heads, dim), torch.nan, dtype=q.dtype, device=random.device)
        cache.flatten(0, 1)[whole.slot_mappings[0]] = random(len(whole.slot_mappings[0]), kv_heads, dim)
        caches.append(cache.to(cache_dtype or q.dtype))
    caches_fp32 = [cache.float() for cache in caches]
    how: dict[str, Any] = {"scale": dim**-0.5, "window": window, "sinks": sinks, "softcap": softcap}
    extended = "" if sinks is None else f", sinks, softcap {softcap}"
    return Case(
        f"attention {shape}, {len(mix)} sequences, window {window}, {cache_dtype or q.dtype}{extended}",
        lambda: (
            attention(
                q, caches[0], caches[1], step.query_start_loc, step.seq_lens, step.page_tables[0], step.max_kv_len,
                **how,
            ),
        ),
        lambda: (
            attention_torch(
                q.float(), caches_fp32[0], caches_fp32[1],
                step.query_start_loc, step.seq_lens, step.page_tables[0], step.max_kv_len,
                **how,
            ),
        ),
    )  # fmt: skip
