"""The C library's matmul and row kernels agree with plain torch, and keep their bits, on every instruction set here."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.pairs import in_pairs
from tests.worker.ops.harness.cases import poisoned
from tests.worker.ops.harness.cpu_tiers import (
    FUNCTIONS,
    as_written,
    close,
    dtypes,
    needs_library,
    tier,  # noqa: F401
)
from tests.worker.ops.harness.quantized import quantized
from worker import spec
from worker.ops import native as c_library
from worker.ops import native as library
from worker.ops.activation import native as activation_native
from worker.ops.activation import reference
from worker.ops.activation import reference as act_and_mul
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import pack_weight
from worker.ops.norm import native as norm_native
from worker.ops.norm import reference as norm
from worker.ops.paged_kv import CODED, row_dtypes, row_elements
from worker.ops.quantized_weight import E2M1, E4M3, INT4, INT8, QuantizedWeight
from worker.ops.rope import native as rope_native
from worker.ops.rope import qkv_rope_write_unfused
from worker.ops.rope import reference as rotary
from worker.ops.rope import reference as store_kv

pytestmark = [needs_library, pytest.mark.usefixtures("tier")]
NAN = float("nan")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """Returns the same rows further apart, with NaN between them."""
    return pad(x, (0, 3) if x.ndim == 2 else (0, 0, 0, 3), value=NAN)[:, : x.shape[1]]


@dtypes
@pytest.mark.parametrize("n, k", [(64, 64), (100, 77), (33, 1), (1, 300), (257, 1030), (33, 2600), (2080, 70)])
def test_product(dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias = random(n, k, dtype=dtype), random(n, dtype=dtype, seed=1)
    packed = pack_weight([weight], bias, dtype=weight.dtype)
    for t in (1, 16, 17, 33, 70, 300):
        x = random(t, k, dtype=dtype, seed=t)
        with poisoned():
            ours = linear_native.linear(x, packed)
        close(ours, x.double() @ weight.double().T + bias.double())
    assert linear_native.linear(random(0, k, dtype=dtype), packed).shape == (0, n)


@dtypes
def test_unrounded_product(dtype: torch.dtype) -> None:
    x, weight = random(3, 200, dtype=dtype), random(40, 200, dtype=dtype)
    out = linear_native.linear(x, pack_weight([weight], dtype=weight.dtype), out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-4)


@dtypes
@pytest.mark.parametrize("n, k", [(96, 1056), (70, 333), (40, 2600), (2080, 70)])
def test_product_bits_do_not_depend_on_company_or_threads(dtype: torch.dtype, n: int, k: int) -> None:
    x, packed = (
        random(600, k, dtype=dtype),
        pack_weight([random(n, k, dtype=dtype)], random(n, dtype=dtype), dtype=dtype),
    )
    whole = linear_native.linear(x, packed)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for begin, rows in [(0, 1), (599, 1), (7, 2), (100, 16), (3, 17), (50, 32), (60, 33), (5, 70), (0, 512)]:
                assert torch.equal(linear_native.linear(x[begin : begin + rows], packed), whole[begin : begin + rows])
    finally:
        torch.set_num_threads(threads)


def formats(n: int, k: int, dtype: torch.dtype) -> Iterator[list[Tensor | QuantizedWeight]]:
    """Returns weights [n, k]: of one format, of several formats, and with reordered inputs."""
    yield [random(n, k, dtype=dtype)]
    yield [quantized(E4M3, n, k, k)]
    for code_map, group, minimum in ((INT4, 32, False), (INT4, 128, True), (E2M1, 64, False), (INT8, 16, True)):
        yield [quantized(code_map, n, k, group, minimum=minimum)]
    yield [quantized(INT4, n // 2, k, 32), random(n - n // 2, k, dtype=dtype)]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
    yield [replace(quantized(INT4, n, k, 32, minimum=True), input_order=order)]


@dtypes
def test_products_together_have_the_bits_of_each_alone(dtype: torch.dtype) -> None:
    jobs = []
    for n, k in ((70, 256), (33, 1030), (2080, 96)):
        for i, parts in enumerate(formats(n, k, dtype)):
            bias = random(n, dtype=dtype, seed=i) if i % 2 else None
            packed = pack_weight(parts, bias, dtype=dtype)
            jobs += [(random(t, k, dtype=dtype, seed=t), packed) for t in (0, 1, 2, 3, 17, 40)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [linear_native.linear(*job) for job in jobs]
        for count, few in ((1, 7), (2, len(jobs)), (3, len(jobs)), (5, 2)):
            torch.set_num_threads(count)
            for begin in range(0, len(jobs), few):
                with poisoned():
                    together = linear_native.linears(jobs[begin : begin + few])
                for one, other in zip(together, alone[begin : begin + few], strict=True):
                    assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


def test_products_of_no_rows() -> None:
    weight = random(40, 64)
    empty = (random(0, 64), pack_weight([weight], dtype=weight.dtype))
    assert [out.shape for out in linear_native.linears([empty, empty])] == [(0, 40)] * 2


@in_pairs(
    FUNCTIONS | {"offset": [False, True], "shape": [(5, 1), (3, 37), (300, 64), (4, 1152), (6, 3, 24), (70, 4, 128)]},
    indirect=["tier"],
)
def test_norm(dtype: torch.dtype, offset: bool, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    with poisoned():
        ours = norm_native.rms_norm(strided(x), weight, 1e-6, offset)
    close(ours, norm.rms_norm_torch(x, weight, 1e-6, offset=offset))
    assert torch.equal(norm_native.rms_norm(x[2:3], weight, 1e-6, offset), ours[2:3])


@dtypes
@pytest.mark.parametrize("offset", [False, True])
def test_norm_of_a_sum(dtype: torch.dtype, offset: bool) -> None:
    x, residual, weight = random(40, 500, dtype=dtype), random(40, 500, dtype=dtype, seed=1), random(500, dtype=dtype)
    ours, total = norm_native.add_rms_norm(x, residual, weight, 1e-6, offset)
    assert torch.equal(total, x + residual)
    assert torch.equal(ours, norm_native.rms_norm(total, weight, 1e-6, offset))


@dtypes
@pytest.mark.parametrize("activation", reference.GATED)
def test_act_and_mul_agrees_with_torch(dtype: torch.dtype, activation: spec.Activation) -> None:
    number = spec.ACTIVATIONS.index(activation)
    for t, n in ((1, 5), (3, 100), (40, 1024)):
        x = random(t, 2 * n, dtype=dtype) * 4
        with poisoned():
            ours = activation_native.act_and_mul(x, number)
        close(ours, act_and_mul.act_and_mul_torch(x, activation))
        assert torch.equal(activation_native.act_and_mul(x[:1], number), ours[:1])


def test_act_and_mul_of_large_inputs_agrees_with_torch() -> None:
    x = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4] + [1.0] * 6])
    for number, activation in ((spec.ACTIVATIONS.index(one), one) for one in reference.GATED):
        torch.testing.assert_close(
            activation_native.act_and_mul(x, number),
            act_and_mul.act_and_mul_torch(x, activation),
            atol=1e-30,
            rtol=1e-5,
        )


@pytest.mark.parametrize("activation", reference.GATED)
def test_act_and_mul_keeps_a_nan(activation: spec.Activation) -> None:
    x = torch.ones(1, 40)
    x[0, 3] = x[0, 25] = torch.nan
    ours = activation_native.act_and_mul(x, spec.ACTIVATIONS.index(activation))
    assert torch.equal(ours.isnan(), act_and_mul.act_and_mul_torch(x, activation).isnan()) and ours.isnan().sum() == 2


def tables(positions: int, d: int) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(positions).float(), 1e4 ** -(torch.arange(0, d, 2) / d)).repeat(1, 2)
    return angle.cos(), angle.sin()


@dtypes
@pytest.mark.parametrize("d", [2, 24, 64, 96, 256])
def test_rotary(dtype: torch.dtype, d: int) -> None:
    q, k, positions = random(50, 4, d, dtype=dtype), random(50, 2, d, dtype=dtype, seed=1), torch.randperm(50)
    ours = rope_native.rotary(strided(q), strided(k), *tables(50, d), positions)
    for one, plain in zip(ours, rotary.rotary_torch(q, k, *tables(50, d), positions), strict=True):
        close(one, plain)
    apart = q.transpose(0, 1).contiguous().transpose(0, 1)  # strided, so that a token's heads are far apart in memory
    assert torch.equal(rope_native.rotary(apart, k, *tables(50, d), positions)[0], ours[0])


@dtypes
@pytest.mark.parametrize("page_size, d", [(4, 24), (32, 64)])
def test_write(dtype: torch.dtype, page_size: int, d: int) -> None:
    k, v = random(9, 2, d, dtype=dtype), random(9, 2, d, dtype=dtype, seed=1)
    ours, plain = ([torch.zeros(5, page_size, 2, d, dtype=dtype) for _ in "kv"] for _ in range(2))
    slots = torch.randperm(5 * page_size)[:9]
    rope_native.store_kv(strided(k), strided(v), *ours, slots)
    store_kv.store_kv_torch(k, v, *plain, slots)
    assert all(torch.equal(a, b) for a, b in zip(ours, as_written(*plain), strict=True))


def caches_of(codes: torch.dtype, *shape: int) -> list[Tensor]:
    """Returns caches of zeros for keys and values, with room for scales."""
    *outer, d = shape
    return [torch.zeros(*outer, row_elements(d, row, "cpu"), dtype=torch.uint8).view(row) for row in row_dtypes(codes)]


def assert_same_bytes(ours: list[Tensor], others: list[Tensor]) -> None:
    for a, b in zip(ours, others, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and a.view(torch.uint8).any()


@in_pairs(FUNCTIONS | {"codes": CODED, "page_size, d": [(4, 7), (32, 64), (1, 256), (16, 72)]}, indirect=["tier"])
def test_write_of_codes(dtype: torch.dtype, codes: torch.dtype, page_size: int, d: int) -> None:
    """The bytes equal the plain form's, even for rows of zeros, of tiny numbers, and of very different numbers."""
    far = torch.logspace(-44, 38, 40)[:, None, None]
    k, v = random(40, 2, d, dtype=dtype), (random(40, 2, d, seed=1) * far).clamp(-3e38, 3e38).to(dtype)
    k[3], k[5, 1, 1:], k[7, 0] = 0.0, 1e-6, 1e-38
    slots = torch.randperm(40 * page_size)[:40]
    for centre in centres_of(codes, 2, d):
        ours, plain = caches_of(codes, 40, page_size, 2, d), caches_of(codes, 40, page_size, 2, d)
        rope_native.store_kv(strided(k), strided(v), *ours, slots, centre)
        store_kv.store_kv_torch(k, v, *plain, slots, centre)
        assert_same_bytes(ours, plain)
        if centre is not None:
            k[10:] = (k[10:].float() + centre).to(dtype)  # as keys with a large bias are


def centres_of(codes: torch.dtype, heads: int, d: int) -> list[Tensor | None]:
    """Returns centres of keys with which a cache is tested. Only keys in int8 may have one."""
    large = random(heads, d, seed=5) * 200
    return [None] if codes == torch.float8_e4m3fn else [None, large, large]


@dtypes
@pytest.mark.parametrize("codes", CODED)
def test_write_of_codes_keeps_what_is_not_finite_so(dtype: torch.dtype, codes: torch.dtype) -> None:
    k = random(3, 2, 40, dtype=dtype)
    k[1, 0, 17], k[2, 1, 39] = float("nan"), float("-inf")
    ours = caches_of(codes, 3, 1, 2, 40)
    rope_native.store_kv(k, k, *ours, torch.arange(3))
    for rows in (one.view(torch.uint8) for one in ours):
        scales = rows[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32).flatten()
        assert scales.isfinite().tolist() == [True, True, False, True, True, False]


NORMS = ["", "heads", "whole"]


def norm_weights(
    normed: str, heads: int, kv_heads: int, d: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Returns norm weights for each head, or for all heads together."""
    if not normed:
        return None, None
    sizes = (d, d) if normed == "heads" else (heads * d, kv_heads * d)
    return random(sizes[0], dtype=dtype, seed=1), random(sizes[1], dtype=dtype, seed=2)


@in_pairs(FUNCTIONS | {"codes": CODED, "normed": NORMS}, indirect=["tier"])
def test_qkv_rope_write_of_codes_has_the_bits_of_its_parts(dtype: torch.dtype, codes: torch.dtype, normed: str) -> None:
    t, heads, kv_heads, d = 37, 6, 2, 48
    qkv = random(t, (heads + 2 * kv_heads) * d, dtype=dtype)
    q_norm, k_norm = norm_weights(normed, heads, kv_heads, d, dtype)
    qkv[9:, heads * d : (heads + kv_heads) * d] *= 100  # as keys with a large bias are
    ours, parts = caches_of(codes, 2, 32, kv_heads, d), caches_of(codes, 2, 32, kv_heads, d)
    where, before = (*tables(t, d), torch.randperm(t), torch.randperm(64)[:t]), qkv.clone()
    centre = centres_of(codes, kv_heads, d)[-1]
    norms: dict[str, Tensor | None] = {"q_norm": q_norm, "k_norm": k_norm, "k_centre": centre}
    q = rope_native.qkv_rope_write(qkv, *ours, *where, **norms, eps=1e-6, offset=True)
    plain_q = qkv_rope_write_unfused(qkv, *parts, *where, **norms, eps=1e-6, offset=True, dtype=dtype)
    assert torch.equal(q, plain_q) and torch.equal(qkv, before)
    assert_same_bytes(ours, parts)


@in_pairs(FUNCTIONS | {"normed": NORMS, "d": [48, 64]}, indirect=["tier"])
def test_qkv_rope_write_has_the_bits_of_its_parts(dtype: torch.dtype, normed: str, d: int) -> None:
    t, heads, kv_heads = 37, 6, 2
    qkv = random(t, (heads + 2 * kv_heads) * d, dtype=dtype)
    positions, slots = torch.randperm(t), torch.randperm(64)[:t]
    ours, parts = ([torch.zeros(2, 32, kv_heads, d, dtype=dtype) for _ in "kv"] for _ in range(2))
    q_norm, k_norm = norm_weights(normed, heads, kv_heads, d, dtype)
    q = rope_native.qkv_rope_write(
        qkv, *ours, *tables(t, d), positions, slots, q_norm=q_norm, k_norm=k_norm, eps=1e-6, offset=True
    )
    plain_q, k, v = qkv.view(t, -1, d).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        parted = ((plain_q, q_norm), (k, k_norm))
        plain_q, k = (norm_native.rms_norm(x.reshape(t, -1, len(w)), w, 1e-6, True).view(x.shape) for x, w in parted)
    plain_q, k = rope_native.rotary(plain_q, k, *tables(t, d), positions)
    rope_native.store_kv(k, v, *parts, slots)
    assert torch.equal(q, plain_q)
    assert all(torch.equal(a, b) for a, b in zip(ours, parts, strict=True))


def test_other_dtypes_use_torch() -> None:
    assert c_library.available(torch.float32)
    assert not c_library.available(torch.float16)
    assert not c_library.available(torch.float64)


def test_library_is_switched_off_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for cached in (library.library, library.level, library.kernels):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    monkeypatch.setenv("SLUICE_NATIVE", "0")
    assert not c_library.available(torch.float32)
    assert c_library.tier() == "none"
