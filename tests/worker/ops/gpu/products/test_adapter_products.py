"""Triton kernels compute the products of adapters, and no row depends on other rows."""

import pytest
import torch

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, random
from worker.lora.loaded import Product, ProductPart
from worker.ops.linear.packed import PackedLinear


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("rank", [32, 96])
def test_product_is_that_of_both_matrices_and_each_row_that_of_it_alone(
    rank: int, dtype: torch.dtype, device: str
) -> None:
    from worker.ops.linear.triton import linear_triton

    def multiply(x: torch.Tensor, packed: PackedLinear, *, fp32_out: bool = False) -> torch.Tensor:
        return linear_triton(x, packed.weight, packed.bias, fp32_out=fp32_out)

    x = random(70, 72, dtype=dtype, device=device)
    a, b = (random(*shape, dtype=dtype, device=device, seed=1) / 8 for shape in ((rank, 72), (130, rank)))
    scale = random(130, device=device, seed=2)
    part = ProductPart(PackedLinear(b, None, True), 0, rank, 0, 130)
    product = Product(PackedLinear(a, None, True), (part,), scale)

    def of(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(len(x), 130, device=device)
        product.add(y, torch.arange(len(x), device=device), x, 1.0, multiply)
        return y

    found = of(x)
    inner = (x.double() @ a.double().T).to(dtype).double()
    if dtype is torch.float32:
        close(found, ((inner @ b.double().T) * scale.double()).float())
    for begin, end in ((0, 1), (3, 20), (20, 70)):
        assert torch.equal(of(x[begin:end]), found[begin:end])


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
def test_all_adapters_of_a_step_together_give_what_each_row_gets_alone(dtype: torch.dtype, device: str) -> None:
    from worker.lora.triton import add_products_triton, part_table, tiles_of

    x, y = random(45, 72, dtype=dtype, device=device), random(45, 130, dtype=dtype, device=device, seed=9)
    factors = random(130, device=device, seed=2)
    rows = [torch.tensor(each, device=device) for each in (range(3, 40, 2), [0], [1, 2, 44])]
    scales, all_a, all_parts = [1.0, 0.5, 2.0], [], []
    for seed, ranks in enumerate([(40, 8), (3, 16), (70,)]):  # ranks of an adapter's parts; the last has one part
        all_a.append(random(sum(ranks), 72, dtype=dtype, device=device, seed=seed) / 8)
        parts, first, column = [], 0, 30 * seed
        for own in ranks:
            b = torch.zeros(50 if len(ranks) > 1 else 66, -(-own // 32) * 32, dtype=dtype, device=device)
            b[:, :own] = random(len(b), own, dtype=dtype, device=device, seed=seed + 7)
            parts.append((b, first, own, column))
            first, column = first + own, column + 50
        all_parts.append(parts)
    tables = [part_table(a, factors, parts) for a, parts in zip(all_a, all_parts, strict=True)]
    tables[2] = torch.nn.functional.pad(tables[2], (0, 0, 0, 1))

    found = y.clone()
    add_products_triton(found, x, tiles_of(rows, scales), tables, 70)
    expected = y.float().clone()
    for own, scale, a, parts in zip(rows, scales, all_a, all_parts, strict=True):
        low = (x[own].double() @ a.double().T).to(dtype).double()
        for b, first, ranks, column in parts:
            at = slice(column, column + len(b))
            added = low[:, first : first + ranks] @ b[:, :ranks].double().T
            expected[own, at] += (added * factors[at].double() * scale).float()
    close(found, expected.to(dtype))
    others = [row for row in range(45) if row not in torch.cat(rows).tolist()]
    assert torch.equal(found[others], y[others])
    for index, own in enumerate(rows):
        for row in own[:3]:
            alone = y[row : row + 1].clone()
            one = tiles_of([torch.tensor([0], device=device)], [scales[index]])
            add_products_triton(alone, x[row : row + 1], one, [tables[index]], 70)
            assert torch.equal(alone[0], found[row])


def test_tiles_of_a_captured_step_give_the_same_bits(device: str) -> None:
    """Tables have slots and parts that nobody uses, and the tiles that are left name a slot without matrices."""
    from worker.lora.triton import PART_FIELDS, AdapterTiles, add_products_triton, launch_products, part_table, tiles_of
    from worker.model_runner.cuda_graph_adapters import tiles_of_slots

    x, y, factors = random(21, 72, device=device), random(21, 130, device=device, seed=9), random(130, device=device)
    slots = torch.tensor([1, -1, 0, 1, 1] + 16 * [1])
    held, tables, scales = [], torch.zeros(4, 3, PART_FIELDS, dtype=torch.int64), [0.5, 2.0, 0.0, 0.0]
    for slot, rank in enumerate((8, 40)):
        a = random(rank, 72, device=device, seed=slot)
        b = torch.zeros(66, -(-rank // 32) * 32, device=device)
        b[:, :rank] = random(66, rank, device=device, seed=slot + 7)
        held += [a, b]  # tables have addresses only
        tables[slot, :1] = part_table(a, factors, [(b, 0, rank, 30 * slot)]).cpu()
    order, tiles = map(torch.from_numpy, tiles_of_slots(slots.numpy()))
    spare = torch.tensor([[3, 0, 0]] * 2, dtype=torch.int32)
    given = AdapterTiles(
        torch.cat((order, torch.tensor([20]))).to(device), torch.cat((tiles, spare)).to(device),
        torch.tensor(scales, device=device),
    )  # fmt: skip
    captured, eager = y.clone(), y.clone()
    launch_products(captured, x, given, tables.view(-1, PART_FIELDS).to(device), 3, 96)
    rows = [(slots == slot).nonzero().flatten().to(device) for slot in (0, 1)]
    add_products_triton(eager, x, tiles_of(rows, scales[:2]), [tables[slot, :1].to(device) for slot in (0, 1)], 40)
    assert torch.equal(captured, eager) and torch.equal(captured[1], y[1]) and not torch.equal(captured[0], y[0])
