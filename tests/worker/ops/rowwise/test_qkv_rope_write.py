"""The kernel that fuses norm, rotary and write has the bits of three separate kernels."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import TRITON_DTYPES, near, poisoned, random, rope_tables
from worker.ops.norm.reference import sum_split_k
from worker.ops.rope import qkv_rope_write

POSITIONS, SLOTS = [0, 49, 3, 3, 17], [21, 4, 11, 8, 9]
SIZES = [(4, 2, 64), (3, 1, 96), (9, 3, 128), (4, 1, 256)]


@dataclass(frozen=True)
class Case:
    """Five tokens with a strided projection, and caches full of NaN."""

    q_heads: int
    kv_heads: int
    size: int
    dtype: torch.dtype
    device: str

    @property
    def qkv(self) -> Tensor:
        width = (self.q_heads + 2 * self.kv_heads) * self.size
        return random(5, width + 64, dtype=self.dtype, device=self.device)[:, :width]

    def caches(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (6, 4, self.kv_heads, self.size)
        made = [torch.full(shape, torch.nan, device=self.device).to(dtype) for _ in "kv"]
        return made[0], made[1]

    def weights(self, normed: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
        q, k = (random(self.size, dtype=self.dtype, device=self.device, seed=i) for i in (1, 2))
        return (q, k) if normed else (None, None)

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        positions, slots = (torch.tensor(one, device=self.device) for one in (POSITIONS, SLOTS))
        return *rope_tables(50, self.size, self.device), positions, slots


def fused(
    case: Case,
    qkv: Tensor,
    *,
    normed: bool,
    offset: bool,
    last: bool = False,
    cache: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from worker.ops.rope.triton import qkv_rope_write_triton

    cache_k, cache_v = case.caches(cache or case.dtype)
    q_norm, k_norm = case.weights(normed)
    with poisoned():
        q = qkv_rope_write_triton(qkv, cache_k, cache_v, *case.where, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
                                  offset=offset, dtype=case.dtype, norm_last=last)  # fmt: skip
    return q, cache_k, cache_v


def apart(
    case: Case,
    qkv: Tensor,
    *,
    normed: bool,
    offset: bool,
    last: bool = False,
    cache: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from worker.ops.norm.triton import rms_norm_triton
    from worker.ops.rope.triton import rotary_triton, store_kv_triton

    cache_k, cache_v = case.caches(cache or case.dtype)
    parts = qkv.unflatten(1, (-1, case.size))
    q, k, v = parts.split_with_sizes([case.q_heads, case.kv_heads, case.kv_heads], dim=1)
    weights = case.weights(normed)
    cos, sin, positions, slots = case.where
    if last:
        q, k = rotary_triton(q, k, cos, sin, positions)
    if weights[0] is not None:
        q, k = (rms_norm_triton(x, w, 1e-6, offset=offset) for x, w in zip((q, k), weights, strict=True))
    if not last:
        q, k = rotary_triton(q, k, cos, sin, positions)
    store_kv_triton(k, v, cache_k, cache_v, slots)
    return q, cache_k, cache_v


def same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, expected, strict=True):
        # compared as integers, so that NaN equals NaN
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
        assert one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


@pytest.mark.skipif(torch.cuda.is_available(), reason="compilers may add up a row in another order")
@pytest.mark.parametrize("dtype", TRITON_DTYPES[:2])
@pytest.mark.parametrize(
    "how",
    [{"normed": False, "offset": False}, {"normed": True, "offset": False}, {"normed": True, "offset": True},
     {"normed": True, "offset": False, "last": True}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("sizes", SIZES)
def test_qkv_rope_write_triton_agrees_with_torch(
    sizes: tuple[int, int, int], how: dict[str, bool], dtype: torch.dtype
) -> None:
    case = Case(*sizes, dtype, "cpu")
    same(fused(case, case.qkv, **how), apart(case, case.qkv, **how))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_triton_is_near_what_float32_gives(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    case = Case(*sizes, dtype, device)
    got = fused(case, case.qkv, normed=True, offset=True)
    exact_case = Case(*sizes, torch.float32, "cpu")
    cache_k, cache_v = exact_case.caches(torch.float32)
    weights = [one.cpu().float() for one in case.weights(True) if one is not None]
    q = qkv_rope_write(
        case.qkv.cpu().float().contiguous(), cache_k, cache_v, *exact_case.where,
        q_norm=weights[0], k_norm=weights[1], eps=1e-6, offset=True, dtype=torch.float32,
    )  # fmt: skip
    near(got[0].cpu(), q)
    for cache, exact in zip(got[1:], (cache_k, cache_v), strict=True):
        written = cache.cpu().flatten(0, 1)
        near(written[SLOTS], exact.flatten(0, 1)[SLOTS])
        assert int((~written.isnan()).any(-1).any(-1).sum()) == len(SLOTS)  # no other slot was written


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("sizes", SIZES[1:])
def test_add_rms_norm_triton_adds_partial_sums(sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    case = Case(*sizes, dtype, device)
    terms = random(3, *case.qkv.shape, device=device)
    whole = sum_split_k(terms, 2, dtype)
    same(fused(case, terms, normed=True, offset=True), fused(case, whole, normed=True, offset=True))


@pytest.mark.parametrize("sizes", SIZES[:2])
def test_triton_writes_to_a_float8_cache(sizes: tuple[int, int, int], device: str) -> None:
    """Some values are exact in float8, some are too large. All are at position 0, where rotary changes nothing."""
    case = Case(*sizes, torch.float16, device)
    qkv = case.qkv.to(torch.float8_e4m3fn).half()
    qkv[0, -5:] = torch.tensor([600.0, -600.0, 448.0, -65504.0, 0.0])
    got = fused(case, qkv, normed=False, offset=False, cache=torch.float8_e4m3fn)
    k, v = qkv.unflatten(1, (-1, case.size)).split_with_sizes([case.q_heads + case.kv_heads, case.kv_heads], dim=1)
    assert torch.equal(got[2].flatten(0, 1).float()[SLOTS], v.float().clamp(-448, 448))
    assert torch.equal(got[1].flatten(0, 1)[SLOTS[0]].float(), k[0, case.q_heads :].float())


@pytest.mark.skipif(torch.cuda.is_available(), reason="compilers may add up a row in another order")
@pytest.mark.parametrize("kv_heads", [0, 2])
@pytest.mark.parametrize("dtype", TRITON_DTYPES[:2])
def test_values_are_normed_and_queries_need_no_keys(kv_heads: int, dtype: torch.dtype) -> None:
    from worker.ops.rope.reference import qkv_rope_write_torch
    from worker.ops.rope.triton import qkv_rope_write_triton

    case = Case(4, kv_heads, 64, dtype, "cpu")
    norms = {f"{name}_norm": random(64, dtype=dtype, seed=seed) for seed, name in enumerate("qkv")}
    results = []
    for function in (qkv_rope_write_triton, qkv_rope_write_torch):
        caches = [torch.zeros(6, 4, kv_heads, 64, dtype=dtype) for _ in "kv"]
        q = function(case.qkv.contiguous(), *caches, *case.where, **norms, eps=1e-6, offset=False, dtype=dtype)
        results.append((q, *caches))
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape and (kv_heads == 0 or got.numel())
        if got.numel():
            near(got, expected.float())


@pytest.mark.parametrize("dtype", TRITON_DTYPES[:2])
def test_qkv_rope_write_triton_without_values_writes_the_same_keys(dtype: torch.dtype, device: str) -> None:
    """A cache whose keys are the values, too, has one tensor, and a row of the projection has no values."""
    from worker.ops.rope.triton import qkv_rope_write_triton

    case = Case(4, 1, 96, dtype, device)
    q, keys, _ = fused(case, case.qkv, normed=False, offset=False)
    cache, _ = case.caches(dtype)
    with poisoned():
        got = qkv_rope_write_triton(
            case.qkv[:, : 5 * 96], cache, None, *case.where, q_norm=None, k_norm=None, eps=1e-6, offset=False,
            dtype=dtype,
        )  # fmt: skip
    same((got, cache), (q, keys))
