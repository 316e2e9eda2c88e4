"""The Triton kernels of sample.py: each row's vocabulary is dealt out in parts, so that few rows fill the device too.

Every sum is of integers, so neither the parts nor the order in which atomics arrive can show. The launches:

    _peak   each part's highest logit
    cut     three kernels in cut_triton.py, where some row may ask for top-k or top-p
    _mass   the mass of what each part keeps
    _pick   the part that holds the drawn point, then the token

Each reads from the device what a row wants, and leaves alone the rows it has nothing to do for.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.softmax_weights import LOW_31, LOWEST, by_row, gaps, is_drawn, kept, ordered, row_peak
from worker.kernels.gpu.top_k_top_p import FEW, LISTED, STATS, TopKTopP, find_top_k_top_p
from worker.kernels.params import PlainParams, Stages

PART = 2048  # tokens a program looks at
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def _peak_kernel(
    logits_ptr, best_ptr, low_ptr, stats_ptr, listed_ptr, stride, width, parts,
    CUT: tl.constexpr, STATS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One part: its highest logit and the lowest id that has it, in one integer; its lowest finite logit."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits_ptr + row * stride + at, mask=at < width, other=float("-inf"))
    best = tl.where(at < width, (ordered(x).to(tl.int64) << 32) | (at ^ LOW_31), LOWEST)
    tl.store(best_ptr + row * parts + part, tl.max(best, axis=0))
    if CUT:
        low = tl.min(tl.where(tl.abs(x) < float("inf"), x, float("inf")), axis=0)
        tl.store(low_ptr + row * parts + part, low)
        if part == 0:
            tl.store(stats_ptr + row * STATS + tl.arange(0, STATS), tl.zeros((STATS,), tl.int64))
            tl.store(listed_ptr + row, 0)


@by_row
def _mass_kernel(
    logits_ptr, best_ptr, limit_ptr, mass_ptr, tied_ptr, temperature_ptr, min_p_ptr, stride, width, parts,
    CUT: tl.constexpr, LIBRARY: tl.constexpr, PART: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One part: the mass of its tokens below the limit, and how many are at it."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    peak, _ = row_peak(best_ptr, row, parts, BLOCK_S)
    if is_drawn(peak, temperature):
        gap = gaps(logits_ptr, row, stride, part * PART + tl.arange(0, PART), width, peak, temperature)
        weight = kept(gap, tl.load(min_p_ptr + row), LIBRARY)
        if CUT:
            limit, key = tl.load(limit_ptr + row), gap.to(tl.int32, bitcast=True)
            tied = tl.sum(((key == limit) & (weight > 0)).to(tl.int32), axis=0)
            tl.store(tied_ptr + row * parts + part, tied)
            weight = tl.where(key < limit, weight, 0)
        tl.store(mass_ptr + row * parts + part, tl.sum(weight, axis=0))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _uniform(seed, position):
    """As in sample.py, to the bit."""
    bits = _mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN)
    return (((bits >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * (2.0**-52)


@triton.jit
def _draw(
    logits_ptr, limit_ptr, allowed_ptr, mass_ptr, tied_ptr, row, stride, width, parts, peak, temperature, min_p, u,
    CUT: tl.constexpr, LIBRARY: tl.constexpr, PART: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The token at which the kept mass of the row, in the order of ids, passes the share u."""
    each = tl.arange(0, BLOCK_S)
    mass = tl.load(mass_ptr + row * parts + each, mask=each < parts, other=0)
    if CUT:
        limit, allowed = tl.load(limit_ptr + row), tl.load(allowed_ptr + row)
        tied = tl.load(tied_ptr + row * parts + each, mask=each < parts, other=0).to(tl.int64)
        before = tl.cumsum(tied, axis=0) - tied
        spared = tl.minimum(tl.maximum(allowed - before, 0), tied)
        mass += spared * kept(limit.to(tl.float32, bitcast=True), min_p, LIBRARY)
    reached = tl.cumsum(mass, axis=0)
    total = tl.max(reached, axis=0)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.sum((reached <= target).to(tl.int32), axis=0)
    at = part * PART + tl.arange(0, PART)
    gap = gaps(logits_ptr, row, stride, at, width, peak, temperature)
    weight = kept(gap, min_p, LIBRARY)
    if CUT:
        key = gap.to(tl.int32, bitcast=True)
        rank = tl.cumsum((key == limit).to(tl.int64), axis=0) + tl.sum(tl.where(each == part, before, 0), axis=0)
        weight = tl.where((key < limit) | ((key == limit) & (rank <= allowed)), weight, 0)
    passed = tl.cumsum(weight, axis=0) + tl.sum(tl.where(each == part, reached - mass, 0), axis=0)
    return tl.minimum(part * PART + tl.sum((passed <= target).to(tl.int32), axis=0), width - 1)


@by_row
def _pick_kernel(
    logits_ptr, best_ptr, limit_ptr, allowed_ptr, mass_ptr, tied_ptr, out_ptr,
    temperature_ptr, min_p_ptr, seeds_ptr, positions_ptr, stride, width, parts,
    GREEDY: tl.constexpr, CUT: tl.constexpr, LIBRARY: tl.constexpr, PART: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    peak, chosen = row_peak(best_ptr, row, parts, BLOCK_S)
    if not GREEDY:
        temperature = tl.load(temperature_ptr + row)
        chosen = tl.where(temperature == 0, chosen, 0)
        if is_drawn(peak, temperature):
            u = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            chosen = _draw(
                logits_ptr, limit_ptr, allowed_ptr, mass_ptr, tied_ptr, row, stride, width, parts,
                peak, temperature, tl.load(min_p_ptr + row), u, CUT, LIBRARY, PART, BLOCK_S,
            ).to(tl.int64)  # fmt: skip
    tl.store(out_ptr + row, chosen)


def sample_triton(
    logits: Tensor, params: PlainParams, stages: Stages, *, part: int = PART, few: int = FEW, listed: int = LISTED
) -> Tensor:
    """sample_plain: logits [R, V] float32 -> ids [R] int64; two to eight launches, no look at the device.

    `part`, `few` and `listed` share the work out otherwise and change nothing.
    """
    rows, width = logits.shape
    _check(logits, params)
    parts = triton.cdiv(width, part)
    shape = logits.stride(0), width, parts
    best, mass = (torch.empty(rows, parts, dtype=torch.int64, device=logits.device) for _ in range(2))
    tied = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    cuts = TopKTopP.empty(rows, parts, listed, logits.device)
    library, block_s = logits.is_cuda, triton.next_power_of_2(parts)
    cut = not stages.all_greedy and (stages.any_top_k or stages.any_top_p)
    _peak_kernel[(parts, rows)](
        logits, best, cuts.low, cuts.stats, cuts.listed, *shape, CUT=cut, STATS=STATS, PART=part, num_warps=8
    )
    if cut:
        find_top_k_top_p(logits, best, params, cuts, part, few)
    if not stages.all_greedy:
        _mass_kernel[(parts, rows)](
            logits, best, cuts.limit, mass, tied, params.temperature, params.min_p, *shape,
            CUT=cut, LIBRARY=library, PART=part, BLOCK_S=block_s, num_warps=8,
        )  # fmt: skip
    _pick_kernel[(rows,)](
        logits, best, cuts.limit, cuts.allowed, mass, tied, out,
        params.temperature, params.min_p, params.seeds, params.positions, *shape,
        GREEDY=stages.all_greedy, CUT=cut, LIBRARY=library, PART=part, BLOCK_S=block_s, num_warps=8,
    )  # fmt: skip
    return out


def _check(logits: Tensor, params: PlainParams) -> None:
    floats = params.temperature, params.top_p, params.min_p
    ints = params.top_k, params.seeds, params.positions
    assert logits.dtype == torch.float32 and (logits.stride(1) == 1 or logits.shape[1] == 1)
    assert all(column.dtype == torch.float32 for column in floats) and all(c.dtype == torch.int64 for c in ints)
    assert all(c.shape == logits.shape[:1] and c.is_contiguous() and c.device == logits.device for c in floats + ints)
