"""Triton kernels that choose the experts of each row and group the rows by expert. The host reads nothing back.

A slot is one of the `chosen` experts of a row: slot s belongs to row s // chosen. Matrix products are computed for
tiles of slots with the same expert. Only the device knows how many tiles an expert needs. So the host launches as many
programs as could be needed, and the programs read from a table which slots they compute.

The bits of a row depend only on its own logits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.sampling.triton_top_k_top_p import LOW_31_BITS, LOWEST_INT64, sortable_bits
from worker.spec import ExpertGroups

BLOCK_SLOTS, BLOCK_TILES = 2048, 64
LEAST_SUM = tl.constexpr(1e-20)  # as in worker/ops/moe/packed.py
TABLE_COLUMNS = 3  # the columns of Groups.table: expert, index of its first slot in `order`, number of slots


@dataclass(frozen=True, slots=True)
class Groups:
    """The slots of a step, grouped into tiles. All slots of a tile have the same expert.

    If `is_sorted` is False, each slot is a tile of its own.
    """

    numbers: Tensor  # [T, chosen] int32: the expert of each slot
    order: Tensor  # [T * chosen] int32: the slots, sorted by expert, then by number; only read if is_sorted
    table: Tensor  # [tiles, TABLE_COLUMNS] int32: a row for each tile; only read if is_sorted
    tiles: int
    is_sorted: bool


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def _in_chosen_groups(
    scores, exists, expert, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BEST: tl.constexpr,
    GROUP_SIZE: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Returns which experts are in the groups with the greatest scores. The first of equal groups is chosen.

    scores: of each expert; a group's score is the sum of its BEST greatest ones, added from the greatest on
    """
    group, slot = expert // GROUP_SIZE, tl.arange(0, BLOCK_G)
    sums = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    for number in range(GROUPS):
        own = exists & (group == number)
        keys = tl.where(own, (sortable_bits(scores).to(tl.int64) << 32) | (expert ^ LOW_31_BITS), LOWEST_INT64)
        total = 0.0
        for _ in tl.static_range(BEST):
            best = ((tl.max(keys, axis=0) & LOW_31_BITS) ^ LOW_31_BITS).to(tl.int32)
            total += tl.sum(tl.where(expert == best, scores, 0.0), axis=0)
            keys = tl.where(expert == best, LOWEST_INT64, keys)
        sums = tl.where(slot == number, total, sums)
    keys = (sortable_bits(sums).to(tl.int64) << 32) | (slot ^ LOW_31_BITS)
    keys = tl.where(slot < GROUPS, keys, LOWEST_INT64)
    chosen = tl.zeros(expert.shape, dtype=tl.int1)
    for _ in range(CHOSEN_GROUPS):
        best = ((tl.max(keys, axis=0) & LOW_31_BITS) ^ LOW_31_BITS).to(tl.int32)
        chosen = chosen | (group == best)
        keys = tl.where(slot == best, LOWEST_INT64, keys)
    return chosen


@triton.jit
def _choose_experts_kernel(
    logits_ptr, scales_ptr, choice_bias_ptr, numbers_ptr, weights_ptr, experts, stride,
    CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BEST: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Chooses experts. Each program chooses the experts of one row."""
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    exists = expert < experts
    logits = tl.load(logits_ptr + row * stride + expert, mask=exists, other=float("-inf"))
    compared = logits
    if choice_bias_ptr is not None:
        if SIGMOID:
            scores_of_all = _sigmoid(logits)
        else:
            scores_of_all = tl.exp(logits - tl.max(logits, axis=0))
            scores_of_all = tl.div_rn(scores_of_all, tl.sum(scores_of_all, axis=0))
        compared = scores_of_all + tl.load(choice_bias_ptr + expert, mask=exists, other=0.0)
    # Among equal numbers, the key of a lower expert number is higher.
    keys = (sortable_bits(compared).to(tl.int64) << 32) | (expert ^ LOW_31_BITS)
    if GROUPS > 1:
        scores = compared
        if BEST > 1 and choice_bias_ptr is None:
            scores = _sigmoid(logits) if SIGMOID else tl.exp(logits - tl.max(logits, axis=0))
        exists = exists & _in_chosen_groups(scores, exists, expert, GROUPS, CHOSEN_GROUPS, BEST, GROUP_SIZE, BLOCK_G)
    keys = tl.where(exists, keys, LOWEST_INT64)
    numbers = tl.zeros((BLOCK_C,), dtype=tl.int32)
    chosen = tl.full((BLOCK_C,), float("-inf"), dtype=tl.float32)
    for index in range(CHOSEN):
        best = tl.max(keys, axis=0)
        number = ((best & LOW_31_BITS) ^ LOW_31_BITS).to(tl.int32)
        numbers = tl.where(slot == index, number, numbers)
        if choice_bias_ptr is None:
            bits = (best >> 32).to(tl.int32)
            logit = (bits ^ ((bits >> 31) & LOW_31_BITS)).to(tl.float32, bitcast=True)
        else:
            logit = tl.sum(tl.where(expert == number, logits, 0.0), axis=0)
        chosen = tl.where(slot == index, logit, chosen)
        keys = tl.where(expert == number, LOWEST_INT64, keys)
    tl.store(numbers_ptr + row * CHOSEN + slot, numbers, mask=slot < CHOSEN)
    if SIGMOID:
        weights = tl.where(slot < CHOSEN, _sigmoid(chosen), 0.0)
        if NORMALIZED:
            weights = tl.div_rn(weights, tl.sum(weights, axis=0) + LEAST_SUM)
    else:
        # With a bias, the first chosen expert may not be the most likely one.
        if choice_bias_ptr is None:
            highest = tl.sum(tl.where(slot == 0, chosen, 0.0), axis=0)
        else:
            highest = tl.max(chosen, axis=0) if NORMALIZED else tl.max(logits, axis=0)
        weights = tl.where(slot < CHOSEN, tl.exp(chosen - highest), 0.0)
        total = tl.sum(weights if NORMALIZED else tl.where(expert < experts, tl.exp(logits - highest), 0.0), axis=0)
        weights = tl.div_rn(weights, total)
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + numbers, mask=slot < CHOSEN, other=0.0)
    tl.store(weights_ptr + row * CHOSEN + slot, weights, mask=slot < CHOSEN)


@triton.jit
def _load_numbers(numbers_ptr, at, slots):
    """Loads the experts of the slots `at`. Slots behind the last one get a number that no expert has."""
    return tl.load(numbers_ptr + at, mask=at < slots, other=LOW_31_BITS)


@triton.jit(do_not_specialize=["slots"])
def _group_slots_kernel(
    numbers_ptr, order_ptr, table_ptr, slots,
    COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Lists the slots and the tiles of the experts, one expert per program.

    The tiles of an expert begin at first // TILE_ROWS + expert, where `first` is the number of slots of all experts
    with lower numbers. So each expert has space for its tiles, and at most one of these tiles stays empty.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK_S)
    before, own = tl.zeros((BLOCK_S,), dtype=tl.int32), tl.zeros((BLOCK_S,), dtype=tl.int32)
    for start in range(0, slots, BLOCK_S):
        numbers = _load_numbers(numbers_ptr, start + at, slots)
        before += (numbers < expert).to(tl.int32)
        own += (numbers == expert).to(tl.int32)
    first, count = tl.sum(before, axis=0), tl.sum(own, axis=0)
    begin, end = first // TILE_ROWS + expert, (first + count) // TILE_ROWS + expert + 1
    for start in range(begin, end, BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        done = (tile - begin) * TILE_ROWS
        entry, mask = table_ptr + tile * COLUMNS, tile < end
        tl.store(entry, tl.zeros((BLOCK_T,), dtype=tl.int32) + expert, mask=mask)
        tl.store(entry + 1, first + done, mask=mask)
        tl.store(entry + 2, tl.minimum(tl.maximum(count - done, 0), TILE_ROWS), mask=mask)
    place = first
    for start in range(0, slots, BLOCK_S):
        is_own = (_load_numbers(numbers_ptr, start + at, slots) == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, axis=0) - 1, start + at, mask=is_own != 0)
        place += tl.sum(is_own, axis=0)


@triton.jit(do_not_specialize=["slots"])
def _count_loads_kernel(numbers_ptr, loads_ptr, slots, BLOCK_S: tl.constexpr):
    """Adds to `loads` how many slots each expert has. A program counts one expert. Sums of integers need no fixed
    order.
    """
    expert = tl.program_id(0)
    own = tl.zeros((BLOCK_S,), dtype=tl.int32)
    for start in range(0, slots, BLOCK_S):
        own += (_load_numbers(numbers_ptr, start + tl.arange(0, BLOCK_S), slots) == expert).to(tl.int32)
    tl.atomic_add(loads_ptr + expert, tl.sum(own, axis=0).to(tl.int64))


@triton.jit
def load_group(numbers_ptr, order_ptr, table_ptr, tile, m, COLUMNS: tl.constexpr, SORTED: tl.constexpr):
    """Returns the expert of a tile (int64), the tile's slots [M] (int64), and how many of these slots exist."""
    if SORTED:
        entry = table_ptr + tile * COLUMNS
        expert, first, rows = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        slots = tl.load(order_ptr + first + m, mask=m < rows, other=0)
    else:
        expert, slots, rows = tl.load(numbers_ptr + tile), tile + tl.zeros_like(m), 1
    return expert.to(tl.int64), slots.to(tl.int64), rows


def choose_experts_triton(
    logits: Tensor,
    chosen: int,
    *,
    normalized: bool,
    scales: Tensor | None = None,
    sigmoid: bool = False,
    choice_bias: Tensor | None = None,
    groups: ExpertGroups | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the same as `choose_experts` in worker/ops/moe/packed.py. The experts' numbers are int32.

    If a row's logits are NaN, its weights are NaN, but its experts' numbers are valid.
    """
    rows, experts = logits.shape
    assert rows and chosen <= experts and logits.stride(1) == 1 and logits.dtype == torch.float32
    for each in (scales, choice_bias):
        assert each is None or (each.shape == (experts,) and each.dtype == torch.float32 and each.is_contiguous())
    of = groups or ExpertGroups(1, 1, 1)
    assert experts % of.count == 0 and chosen <= of.chosen * (experts // of.count)
    numbers = torch.empty(rows, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, chosen, device=logits.device)
    _choose_experts_kernel[(rows,)](
        logits, scales, choice_bias, numbers, weights, experts, logits.stride(0),
        CHOSEN=chosen, SIGMOID=sigmoid, NORMALIZED=normalized,
        GROUPS=of.count, CHOSEN_GROUPS=of.chosen, BEST=of.best, GROUP_SIZE=experts // of.count,
        BLOCK_E=triton.next_power_of_2(experts), BLOCK_C=triton.next_power_of_2(chosen),
        BLOCK_G=triton.next_power_of_2(of.count),
        num_warps=1 if experts <= 256 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return numbers, weights


def group_slots_triton(numbers: Tensor, experts: int, tile_rows: int, *, is_sorted: bool) -> Groups:
    """Groups slots by expert into tiles of at most `tile_rows` slots.

    numbers [T, chosen] int32: the expert of each slot, below `experts`
    is_sorted: if false, no kernel is launched, and each slot is a tile of its own
    """
    slots = numbers.numel()
    if not is_sorted:
        return Groups(numbers, numbers, numbers, slots, False)
    tiles = slots // tile_rows + experts
    order = torch.empty(slots, dtype=torch.int32, device=numbers.device)
    table = torch.empty(tiles, TABLE_COLUMNS, dtype=torch.int32, device=numbers.device)
    _group_slots_kernel[(experts,)](
        numbers, order, table, slots,
        COLUMNS=TABLE_COLUMNS, TILE_ROWS=tile_rows, BLOCK_S=BLOCK_SLOTS, BLOCK_T=BLOCK_TILES, num_warps=8,
    )  # fmt: skip
    return Groups(numbers, order, table, tiles, True)


def count_loads_triton(numbers: Tensor, loads: Tensor) -> None:
    """Adds to loads [E] int64 how often each expert was chosen in numbers [T, chosen]."""
    assert loads.dtype == torch.int64 and loads.is_contiguous()
    _count_loads_kernel[(len(loads),)](numbers, loads, numbers.numel(), BLOCK_S=BLOCK_SLOTS, num_warps=8)
