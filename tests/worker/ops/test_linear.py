from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, near, poisoned, random
from worker.ops.activation.reference import act_and_mul_torch
from worker.ops.linear import gated_linear, linear
from worker.ops.linear.packed import pack
from worker.ops.linear.reference import linear_torch
from worker.ops.linear.triton_tiles import Chains
from worker.ops.norm.reference import sum_split_k
from worker.spec import Activation


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_product(invariant: bool, biased: bool) -> None:
    x, weight = random(5, 70), random(33, 70, seed=1) / 8
    bias = random(33, seed=2) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    packed = pack(weight, bias, invariant=invariant)
    close(linear(x, packed), expected.float())
    close(linear_torch(x, packed), expected.float())


def test_gated_product() -> None:
    x, weight = random(5, 70), random(2 * 33, 70, seed=1) / 8
    close(gated_linear(x, pack(weight, invariant=True), "silu"), act_and_mul_torch(F.linear(x, weight), "silu"))


SHAPES = [(1, 48, 70), (5, 130, 256), (70, 130, 72), (20, 40, 700), (40, 64, 64), (130, 66, 72)]


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_linear_triton_agrees_with_torch(rows: int, columns: int, depth: int, dtype: torch.dtype, device: str) -> None:
    from worker.ops.linear.triton import linear_triton

    x = random(rows, 3 * depth, dtype=dtype, device=device)[:, depth : 2 * depth]  # strided
    weight = random(columns, depth, dtype=dtype, device=device, seed=1) / 8
    bias = random(columns, dtype=dtype, device=device, seed=2)
    expected = x.double() @ weight.double().T
    with poisoned():
        near(linear_triton(x, weight, None), expected)
        biased, wide, terms = (
            linear_triton(x, weight, bias, **{how: True}) for how in ("split_k", "fp32_out", "split_k")
        )
    near(sum_split_k(biased, 2, dtype), expected + bias.double())
    close(wide, (expected + bias.double()).float())
    assert wide.dtype == torch.float32 and torch.equal(terms, biased)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gated_triton(rows: int, activation: Activation, dtype: torch.dtype, device: str) -> None:
    from worker.ops.linear.triton import gated_linear_triton

    x = random(rows, 100, dtype=dtype, device=device)
    weight = random(2 * 90, 100, dtype=dtype, device=device, seed=1) / 8
    for bias in (None, random(2 * 90, dtype=dtype, device=device, seed=2)):
        exact = act_and_mul_torch(
            F.linear(*(None if one is None else one.float() for one in (x, weight, bias))), activation
        )
        with poisoned():
            near(gated_linear_triton(x, weight, bias, activation), exact)


def test_chain_length_depends_on_the_weight_shape_only() -> None:
    from worker.ops.linear.triton_tiles import MAX_CHAINS, chain_length, is_single_chain

    for columns, depth in ((3072, 8192), (2560, 9728), (1152, 6912), (1152, 1024), (5120, 3072), (33, 70)):
        chain = chain_length(columns, depth)
        assert chain % 128 == 0 and -(-depth // chain) <= MAX_CHAINS
        assert depth < 512 or -(-depth // chain) * -(-columns // 64) >= 72  # at least 72 programs
    assert all(
        is_single_chain(torch.empty(shape, device="meta")) for shape in ((16384, 3072), (128256, 3072), (13824, 1152))
    )


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth", "cut"), [
    (150, 130, 700, True),
    (150, 70, 530, True),
    (150, 192, 200, False),
    pytest.param(700, 3072, 8192, True, marks=pytest.mark.gpu),
    pytest.param(700, 1152, 1024, True, marks=pytest.mark.gpu),
    pytest.param(1100, 16384, 3072, False, marks=pytest.mark.gpu),
])  # fmt: skip
def test_triton_bits_of_a_row_do_not_depend_on_the_others(
    rows: int, columns: int, depth: int, cut: bool, dtype: torch.dtype, device: str
) -> None:
    """All tiles give the same bits, whether each chain along K has its own program or one program computes all."""
    from worker.ops.linear.triton import linear_triton

    x = random(rows, depth, dtype=dtype, device=device)
    weight = random(columns, depth, dtype=dtype, device=device, seed=1)
    bias = random(columns, dtype=dtype, device=device, seed=2)
    whole = linear_triton(x, weight, bias)
    for begin, end in ((0, 1), (10, 30), (60, 120), (0, 140)):
        part = linear_triton(x[begin:end], weight, bias, split_k=True)
        assert part.ndim == 2 + cut or end - begin > 64
        assert torch.equal(sum_split_k(part, 2, dtype), whole[begin:end])


@pytest.mark.parametrize("chains", ["together", "split", "spilled"])
def test_every_tile_and_way_to_add_chains_gives_the_same_bits(
    chains: Chains, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With spilled sums, one program computes several tiles."""
    from worker.ops.linear.triton import linear_triton
    from worker.ops.linear.triton_tiles import CANDIDATES, SPILLED_ELEMENTS

    monkeypatch.setattr("worker.ops.linear.triton_accumulate.multiprocessors", lambda device: 1)
    columns, depth = (130, 800) if chains == "spilled" else (40, 520)
    x, weight = (random(*shape, dtype=torch.float16, device=device) for shape in ((20, depth), (columns, depth)))
    bias = random(columns, dtype=torch.float16, device=device, seed=2)
    sizes = {(tile.rows, tile.columns): tile for tile in CANDIDATES["linear"]}
    large = [size for size in sizes if size[0] * size[1] >= SPILLED_ELEMENTS]
    assert large and len(sizes) > 8
    expected = linear_triton(x, weight, bias)
    for size in large if chains == "spilled" else sizes:
        with poisoned():
            found = linear_triton(x, weight, bias, split_k=True, tile=replace(sizes[size], chains=chains))
        assert found.ndim == (3 if chains == "split" else 2)
        assert torch.equal(sum_split_k(found, 2, torch.float16), expected), size


def test_every_tile_of_a_gated_product_gives_the_same_bits(device: str) -> None:
    from worker.ops.linear.triton import gated_linear_triton
    from worker.ops.linear.triton_tiles import CANDIDATES

    x, weight = (random(*shape, dtype=torch.float16, device=device) for shape in ((20, 96), (2 * 70, 96)))
    expected = gated_linear_triton(x, weight, None, "silu")
    for tile in {(tile.rows, tile.columns): tile for tile in CANDIDATES["gated"]}.values():
        assert torch.equal(gated_linear_triton(x, weight, None, "silu", tile=tile), expected), tile


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [
    (70, 80, 96),
    pytest.param(700, 9728, 2560, marks=pytest.mark.gpu),
])  # fmt: skip
def test_gated_triton_has_the_bits_of_the_product_and_the_gate(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: str
) -> None:
    from worker.ops.activation.triton import act_and_mul_triton
    from worker.ops.linear.triton import gated_linear_triton, linear_triton

    x, weight = (random(*shape, dtype=dtype, device=device) for shape in ((rows, depth), (2 * columns, depth)))
    whole = act_and_mul_triton(linear_triton(x, weight, None), "silu")
    for begin, end in ((0, rows), (3, 4), (20, 50), (5, 69)):
        assert torch.equal(gated_linear_triton(x[begin:end], weight, None, "silu"), whole[begin:end])
