"""Packed experts: each expert equals the result of pack_weight, and all experts share a few allocations."""

import ctypes

import pytest
import torch

from tests.worker.ops.harness.cases import random
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library
from tests.worker.ops.harness.quantized import quantized
from worker.ops.linear import native as linear_native
from worker.ops.linear.native import WeightStruct, pack_weight
from worker.ops.moe.native import Arena, CpuExperts, from_records, pack_experts_in_c
from worker.ops.native import HUGE_PAGE
from worker.ops.quantized_weight import INT4, INT8, QuantizedWeight

pytestmark = needs_library
N, K, COUNT = 70, 160, 6


def parts_of(dtype: torch.dtype) -> list[list[torch.Tensor | QuantizedWeight]]:
    """Returns experts with one format, with two formats in each expert, and with reordered inputs."""
    plain, coded = random(N // 2, K, dtype=dtype), quantized(INT4, N // 2, K, 32, minimum=True)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(3))
    ordered = QuantizedWeight(coded.codes, INT4, coded.scale, None, 32, order)
    return [
        [plain, coded], [coded, coded], [quantized(INT8, N, K, 32)], [ordered, plain], [coded, ordered], [plain, plain],
    ]  # fmt: skip


@dtypes
@pytest.mark.parametrize("biased", [False, True])
def test_each_expert_is_the_weight_it_would_be_alone(dtype: torch.dtype, biased: bool) -> None:
    bias = random(COUNT, N, dtype=dtype) if biased else None
    packed = pack_experts_in_c(parts_of(dtype), bias, count=COUNT, dtype=dtype)
    again = from_records([piece.clone() for piece in packed.pieces], packed.records, dtype)
    x = random(5, K, dtype=dtype)
    assert (packed.n, packed.k, packed.count) == (again.n, again.k, again.count) == (N, K, COUNT)
    assert again.nbytes == packed.nbytes and again.records == packed.records
    for number, parts in enumerate(parts_of(dtype)):
        alone = pack_weight(parts, None if bias is None else bias[number], dtype=dtype)
        expected = linear_native.linear(x, alone)
        for one in (packed, again):
            assert torch.equal(linear_native.linear(x, one.weight(number)), expected) and expected.any()


def inside(packed: CpuExperts, address: int) -> bool:
    return any(piece.data_ptr() <= address < piece.data_ptr() + piece.nbytes for piece in packed.pieces)


def test_structs_are_an_array_in_the_order_of_experts_with_all_memory_in_the_pieces() -> None:
    packed = pack_experts_in_c(parts_of(torch.float32), random(COUNT, N), count=COUNT, dtype=torch.float32)
    begin, end = ctypes.addressof(packed.structs), ctypes.sizeof(WeightStruct) * len(packed.structs)
    assert len(packed.structs) == COUNT + 3  # three of the experts have two formats
    for struct in packed.structs:
        assert all(inside(packed, address) for address in (struct.panels, struct.bias, struct.values) if address)
        assert not struct.next or 0 < ctypes.addressof(struct.next.contents) - begin < end
    assert [bool(struct.next) for struct in packed.structs] == [True, False, False, True, True, False] + [False] * 3


def test_experts_of_one_format_share_one_piece_in_huge_pages() -> None:
    experts = ([quantized(INT4, 1024, 512, 32)] for _ in range(40))
    packed = pack_experts_in_c(experts, None, count=40, dtype=torch.bfloat16)
    largest = max(packed.pieces, key=lambda piece: piece.nbytes)
    assert len(packed.pieces) <= 4 and largest.nbytes > 0.97 * packed.nbytes > HUGE_PAGE
    assert largest.data_ptr() % HUGE_PAGE == 0
    one = pack_weight([quantized(INT4, 1024, 512, 32)], dtype=torch.bfloat16)
    assert packed.nbytes < 40 * one.nbytes + 40 * 64


def test_arena_keeps_what_it_has_handed_out() -> None:
    arena, taken = Arena(20), []
    for expert in range(20):
        for size in (7, 300 * (1 + expert % 3)):
            taken.append(arena.take((size,), torch.int64).fill_(len(taken)))
        arena.end_expert()
    pieces = arena.end()
    assert all(tensor.data_ptr() % 64 == 0 and (tensor == i).all() for i, tensor in enumerate(taken))
    assert sum(piece.nbytes for piece in pieces) == sum(-(-tensor.nbytes // 64) * 64 for tensor in taken)


def test_experts_are_taken_one_by_one() -> None:
    alive: list[int] = []

    class Counted(list):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__([random(N, K)])
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    most = 0

    def experts():  # type: ignore[no-untyped-def]
        nonlocal most
        for _ in range(COUNT):
            yield Counted()
            most = max(most, len(alive))

    pack_experts_in_c(experts(), None, count=COUNT, dtype=torch.float32)
    assert most == 1


def test_experts_of_different_shapes_are_refused() -> None:
    with pytest.raises(AssertionError):
        pack_experts_in_c([[random(N, K)], [random(N - 2, K)]], None, count=2, dtype=torch.float32)
