"""Triton kernels for sampling. The vocabulary is divided into parts, so that even a few rows keep the device busy.

All sums are sums of integers, so neither the parts nor the order of atomics affects a result. The kernels run in this
order:

    _max_kernel         the highest logit of each part
    triton_top_k_top_p.py      three kernels, if some row may use top-k or top-p
    _weight_sum_kernel  the sum of the weights that remain in each part
    _draw_kernel        chooses the part that contains the drawn point, then the token

Every kernel reads a row's parameters on the device, and skips rows that do not need the kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.ops.sampling.reference import PlainParams, Stages
from worker.ops.sampling.triton_top_k_top_p import (
    LOW_31_BITS,
    LOWEST_INT64,
    MAX_LISTED_KEYS,
    MAX_ONE_PASS_CANDIDATES,
    STATS_PER_ROW,
    TopKTopP,
    find_top_k_top_p,
    is_sampled,
    jit_unaligned_columns,
    logit_gaps,
    min_p_weight,
    row_max,
    sortable_bits,
)

PART_SIZE = 2048  # tokens that one program reads
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def _max_kernel(
    logits_ptr, part_max_ptr, part_min_ptr, stats_ptr, listed_ptr, stride, width, parts,
    FILTERED: tl.constexpr, STATS_PER_ROW: tl.constexpr, PART_SIZE: tl.constexpr,
):  # fmt: skip
    """Finds a part's highest logit and the lowest id with it, as one integer, and the part's lowest finite logit."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token_ids = part * PART_SIZE + tl.arange(0, PART_SIZE)
    x = tl.load(logits_ptr + row * stride + token_ids, mask=token_ids < width, other=float("-inf"))
    packed = (sortable_bits(x).to(tl.int64) << 32) | (token_ids ^ LOW_31_BITS)
    part_max = tl.where(token_ids < width, packed, LOWEST_INT64)
    tl.store(part_max_ptr + row * parts + part, tl.max(part_max, axis=0))
    if FILTERED:
        part_min = tl.min(tl.where(tl.abs(x) < float("inf"), x, float("inf")), axis=0)
        tl.store(part_min_ptr + row * parts + part, part_min)
        if part == 0:
            stats = stats_ptr + row * STATS_PER_ROW + tl.arange(0, STATS_PER_ROW)
            tl.store(stats, tl.zeros((STATS_PER_ROW,), tl.int64))
            tl.store(listed_ptr + row, 0)


@jit_unaligned_columns
def _weight_sum_kernel(
    logits_ptr, part_max_ptr, limit_ptr, weight_sums_ptr, ties_ptr, temperature_ptr, min_p_ptr, stride, width, parts,
    FILTERED: tl.constexpr, USE_LIBDEVICE: tl.constexpr, PART_SIZE: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Computes for one part the sum of the weights of tokens below the limit, and the number of tokens at the limit."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    max_logit, _ = row_max(part_max_ptr, row, parts, BLOCK_PARTS)
    if is_sampled(max_logit, temperature):
        token_ids = part * PART_SIZE + tl.arange(0, PART_SIZE)
        gap = logit_gaps(logits_ptr, row, stride, token_ids, width, max_logit, temperature)
        weight = min_p_weight(gap, tl.load(min_p_ptr + row), USE_LIBDEVICE)
        if FILTERED:
            limit, key = tl.load(limit_ptr + row), gap.to(tl.int32, bitcast=True)
            ties = tl.sum(((key == limit) & (weight > 0)).to(tl.int32), axis=0)
            tl.store(ties_ptr + row * parts + part, ties)
            weight = tl.where(key < limit, weight, 0)
        tl.store(weight_sums_ptr + row * parts + part, tl.sum(weight, axis=0))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _uniform(seed, position):
    """Computes the same as `uniform` in worker/ops/sampling/reference.py, with the same bits."""
    bits = _mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN)
    return (((bits >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * (2.0**-52)


@triton.jit
def _draw_token(
    logits_ptr, limit_ptr, allowed_ptr, weight_sums_ptr, ties_ptr, row, stride, width, parts, max_logit,
    temperature, min_p, u,
    FILTERED: tl.constexpr, USE_LIBDEVICE: tl.constexpr, PART_SIZE: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Draws a token: the first one, in the order of ids, whose cumulative weight exceeds u times the total weight."""
    part_index = tl.arange(0, BLOCK_PARTS)
    weight_sums = tl.load(weight_sums_ptr + row * parts + part_index, mask=part_index < parts, other=0)
    if FILTERED:
        limit, allowed = tl.load(limit_ptr + row), tl.load(allowed_ptr + row)
        ties = tl.load(ties_ptr + row * parts + part_index, mask=part_index < parts, other=0).to(tl.int64)
        before = tl.cumsum(ties, axis=0) - ties
        kept_ties = tl.minimum(tl.maximum(allowed - before, 0), ties)
        weight_sums += kept_ties * min_p_weight(limit.to(tl.float32, bitcast=True), min_p, USE_LIBDEVICE)
    reached = tl.cumsum(weight_sums, axis=0)
    total = tl.max(reached, axis=0)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.sum((reached <= target).to(tl.int32), axis=0)
    token_ids = part * PART_SIZE + tl.arange(0, PART_SIZE)
    gap = logit_gaps(logits_ptr, row, stride, token_ids, width, max_logit, temperature)
    weight = min_p_weight(gap, min_p, USE_LIBDEVICE)
    if FILTERED:
        key = gap.to(tl.int32, bitcast=True)
        rank = tl.cumsum((key == limit).to(tl.int64), axis=0) + tl.sum(tl.where(part_index == part, before, 0), axis=0)
        weight = tl.where((key < limit) | ((key == limit) & (rank <= allowed)), weight, 0)
    passed = tl.cumsum(weight, axis=0) + tl.sum(tl.where(part_index == part, reached - weight_sums, 0), axis=0)
    return tl.minimum(part * PART_SIZE + tl.sum((passed <= target).to(tl.int32), axis=0), width - 1)


@jit_unaligned_columns
def _draw_kernel(
    logits_ptr, part_max_ptr, limit_ptr, allowed_ptr, weight_sums_ptr, ties_ptr, out_ptr,
    temperature_ptr, min_p_ptr, seeds_ptr, positions_ptr, stride, width, parts,
    GREEDY: tl.constexpr, FILTERED: tl.constexpr, USE_LIBDEVICE: tl.constexpr, PART_SIZE: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    max_logit, chosen = row_max(part_max_ptr, row, parts, BLOCK_PARTS)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        chosen = tl.where(temperature == 0, chosen, 0)
        if is_sampled(max_logit, temperature):
            u = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            chosen = _draw_token(
                logits_ptr, limit_ptr, allowed_ptr, weight_sums_ptr, ties_ptr, row, stride, width, parts,
                max_logit, temperature, tl.load(min_p_ptr + row), u, FILTERED, USE_LIBDEVICE, PART_SIZE, BLOCK_PARTS,
            ).to(tl.int64)  # fmt: skip
    tl.store(out_ptr + row, chosen)


def sample_triton(
    logits: Tensor, params: PlainParams, stages: Stages, *, part_size: int = PART_SIZE,
    max_one_pass: int = MAX_ONE_PASS_CANDIDATES, max_listed: int = MAX_LISTED_KEYS,
) -> Tensor:  # fmt: skip
    """Computes the same as `sample_plain`: logits [R, V] float32 -> ids [R] int64.

    Launches two to eight kernels, and never waits for the device.

    `part_size`, `max_one_pass` and `max_listed` change how the work is divided, but never the result.
    """
    rows, width = logits.shape
    _check(logits, params)
    parts = triton.cdiv(width, part_size)
    row_shape = logits.stride(0), width, parts
    part_max, weight_sums = (torch.empty(rows, parts, dtype=torch.int64, device=logits.device) for _ in range(2))
    ties = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    filters = TopKTopP.empty(rows, parts, max_listed, logits.device)
    use_libdevice, block_parts = logits.is_cuda, triton.next_power_of_2(parts)
    filtered = not stages.all_greedy and (stages.any_top_k or stages.any_top_p)
    _max_kernel[(parts, rows)](
        logits, part_max, filters.part_min, filters.stats, filters.listed, *row_shape, FILTERED=filtered,
        STATS_PER_ROW=STATS_PER_ROW, PART_SIZE=part_size, num_warps=8,
    )  # fmt: skip
    if filtered:
        find_top_k_top_p(logits, part_max, params, filters, part_size, max_one_pass)
    if not stages.all_greedy:
        _weight_sum_kernel[(parts, rows)](
            logits, part_max, filters.limit, weight_sums, ties, params.temperature, params.min_p, *row_shape,
            FILTERED=filtered, USE_LIBDEVICE=use_libdevice, PART_SIZE=part_size, BLOCK_PARTS=block_parts, num_warps=8,
        )  # fmt: skip
    _draw_kernel[(rows,)](
        logits, part_max, filters.limit, filters.allowed, weight_sums, ties, out,
        params.temperature, params.min_p, params.seeds, params.positions, *row_shape,
        GREEDY=stages.all_greedy, FILTERED=filtered, USE_LIBDEVICE=use_libdevice, PART_SIZE=part_size,
        BLOCK_PARTS=block_parts, num_warps=8,
    )  # fmt: skip
    return out


def _check(logits: Tensor, params: PlainParams) -> None:
    floats = params.temperature, params.top_p, params.min_p
    ints = params.top_k, params.seeds, params.positions
    assert logits.dtype == torch.float32 and (logits.stride(1) == 1 or logits.shape[1] == 1)
    assert all(column.dtype == torch.float32 for column in floats) and all(c.dtype == torch.int64 for c in ints)
    assert all(c.shape == logits.shape[:1] and c.is_contiguous() and c.device == logits.device for c in floats + ints)
