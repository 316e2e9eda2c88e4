"""Where top-k and top-p cut a row, found without a sort by many programs together, to the token and to the bit.

    _count    how many tokens, and how much mass, lie nearer to the row's peak than each of a few edges; for rows with
              many tokens between the two that must have the cut between them, once more with edges between those
    _collect  the keys between the two edges
    _settle   one program a row, by bisection: the last key that is kept, and how many of the tokens that have it

Top-p may look at the row as if top-k had not cut it: the mass it asks for is a share of what top-k leaves, so it is
reached before anything that top-k leaves out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.softmax_weights import by_row, gaps, is_drawn, row_peak, softmax_weight
from worker.kernels.params import PlainParams

FEW = 2048  # with more candidates than this a row is looked at twice
LISTED = 16_384  # keys of a row that are collected; where ties make it more, _settle goes through the row again
EDGES = tl.constexpr(8)
STATS = tl.constexpr(2 * 2 * 8)  # a row's statistics: for each pass, the count and the mass before each edge
REACH = tl.constexpr(28.0)  # exp(-28) < 2**-40
COUNT = tl.constexpr(1 << 52)  # one token, where a part's count shares an integer with its mass (2048 * 2**40 at most)
INFINITE = tl.constexpr(0x7F800000)  # the key of an infinite gap


@triton.jit
def _share(top_p, total):
    """The mass that top-p asks for."""
    need = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(need, 1), total)


@triton.jit
def _entry(values, at):
    return tl.sum(tl.where(tl.arange(0, EDGES) == at, values, 0), axis=0)


@triton.jit
def _bracket(edges_ptr, stats_ptr, row, top_k, top_p, PASS: tl.constexpr):
    """By the counts of one pass: the edges [start, end) that have the cut between them, what lies before, how many
    tokens lie between, and whether top-k cuts at all. Where nothing does, start = end.
    """
    j = tl.arange(0, EDGES)
    stats = stats_ptr + row * STATS
    edges = tl.load(edges_ptr + (row * 2 + PASS) * EDGES + j)
    counts = tl.load(stats + PASS * 2 * EDGES + j)
    masses = tl.load(stats + (PASS * 2 + 1) * EDGES + j)
    row_count, row_mass = tl.load(stats + EDGES - 1), tl.load(stats + 2 * EDGES - 1)
    counted = (top_k > 0) & (top_k < row_count)
    reached = tl.sum((counts < top_k).to(tl.int32), axis=0)
    first, last = tl.where(counted, reached - 1, EDGES), tl.where(counted, reached, 0)
    if top_p < 1:  # of what top-k leaves, which is known to lie between two edges
        least = tl.where(counted, tl.maximum(_entry(masses, first), 1), row_mass)
        most = tl.where(counted, _entry(masses, last), row_mass)
        first = tl.minimum(first, tl.sum((masses < _share(top_p, least)).to(tl.int32), axis=0) - 1)
        last = tl.maximum(last, tl.sum((masses < _share(top_p, most)).to(tl.int32), axis=0))
    first = tl.minimum(first, last)
    count, between = _entry(counts, first), _entry(counts, last) - _entry(counts, first)
    return _entry(edges, first), _entry(edges, last), count, _entry(masses, first), between, counted


@triton.jit
def _last_bracket(edges_ptr, stats_ptr, row, top_k, top_p, FEW: tl.constexpr):
    """That of the first pass where it is narrow enough, else of the second."""
    start, end, count, mass, between, counted = _bracket(edges_ptr, stats_ptr, row, top_k, top_p, 0)
    if between > FEW:
        start, end, count, mass, between, counted = _bracket(edges_ptr, stats_ptr, row, top_k, top_p, 1)
    return start, end, count, mass, counted


@triton.jit
def _cut_row(best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_S: tl.constexpr):
    """Whether top-k or top-p may cut the row, its peak and what it asks for."""
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    peak, _ = row_peak(best_ptr, row, parts, BLOCK_S)
    cut = is_drawn(peak, temperature) & (((top_k > 0) & (top_k < width)) | (top_p < 1))
    return cut, peak, temperature, top_k, top_p


@triton.jit
def _edges(top, start, end):
    """EDGES of them: the first is start, the last end, those between evenly spaced from start to top."""
    j = tl.arange(0, EDGES)
    edges = tl.fma(j.to(tl.float32), (top - start) / (EDGES - 1), start)
    return tl.where(j == EDGES - 1, end, tl.minimum(edges, end))


@by_row
def _count_kernel(
    logits_ptr, best_ptr, low_ptr, edges_ptr, stats_ptr, temperature_ptr, top_k_ptr, top_p_ptr, stride, width, parts,
    PASS: tl.constexpr, FEW: tl.constexpr, LIBRARY: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One part: adds to the row's count and mass before each edge. Tokens without mass count nowhere."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cut, peak, temperature, top_k, top_p = _cut_row(
        best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_S
    )
    start, end = 0.0, float("inf")
    if PASS == 1:
        start, end, _, _, between, _ = _bracket(edges_ptr, stats_ptr, row, top_k, top_p, 0)
        cut &= between > FEW
    if cut:
        each, j = tl.arange(0, BLOCK_S), tl.arange(0, EDGES)
        low = tl.min(tl.load(low_ptr + row * parts + each, mask=each < parts, other=float("inf")), axis=0)
        reach = tl.minimum(tl.div_rn(peak - low, temperature), REACH)
        edges = _edges(tl.minimum(end, reach), start, end)
        if part == 0:
            tl.store(edges_ptr + (row * 2 + PASS) * EDGES + j, edges)
        nearer = tl.zeros((EDGES,), tl.int64)
        for begin in range(0, PART, TILE):
            at = part * PART + begin + tl.arange(0, TILE)
            gap = gaps(logits_ptr, row, stride, at, width, peak, temperature)
            weight = softmax_weight(gap, LIBRARY)
            both = tl.where(weight > 0, weight + COUNT, 0)
            nearer += tl.sum(tl.where(gap[:, None] < edges[None, :], both[:, None], 0), axis=0)
        stats = stats_ptr + row * STATS + PASS * 2 * EDGES + j
        tl.atomic_add(stats, (nearer >> 52) & 0xFFF, sem="relaxed")
        tl.atomic_add(stats + EDGES, nearer & (COUNT - 1), sem="relaxed")


@by_row
def _collect_kernel(
    logits_ptr, best_ptr, edges_ptr, stats_ptr, list_ptr, listed_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    stride, width, parts,
    FEW: tl.constexpr, LIBRARY: tl.constexpr, LISTED: tl.constexpr, PART: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One part: puts its candidates on the row's list, in whatever order."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cut, peak, temperature, top_k, top_p = _cut_row(
        best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_S
    )
    if cut:
        start, end, _, _, _ = _last_bracket(edges_ptr, stats_ptr, row, top_k, top_p, FEW)
        gap = gaps(logits_ptr, row, stride, part * PART + tl.arange(0, PART), width, peak, temperature)
        mine = ((gap >= start) & (gap < end) & (softmax_weight(gap, LIBRARY) > 0)).to(tl.int32)
        count = tl.sum(mine, axis=0)
        if count > 0:
            at = tl.atomic_add(listed_ptr + row, count, sem="relaxed") + tl.cumsum(mine, axis=0) - 1
            keys = gap.to(tl.int32, bitcast=True)
            tl.store(list_ptr + row * LISTED + at, keys, mask=(mine > 0) & (at < LISTED))


@triton.jit
def _candidates(source, begin, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """Some of the row's candidate keys, INFINITE in between."""
    list_ptr, count, whole, logits_ptr, row, stride, width, peak, temperature, start, end = source
    at = begin + tl.arange(0, BLOCK)
    if whole:
        gap = gaps(logits_ptr, row, stride, at, width, peak, temperature)
        mine = (gap >= start) & (gap < end) & (softmax_weight(gap, LIBRARY) > 0)
        keys = tl.where(mine, gap.to(tl.int32, bitcast=True), INFINITE)
    else:
        keys = tl.load(list_ptr + at, mask=at < count, other=INFINITE)
    return keys


@triton.jit
def _measure(source, limit, BY_MASS: tl.constexpr, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """Count or mass of the candidates whose key is below `limit`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, source[1], BLOCK):
        keys = _candidates(source, begin, LIBRARY, BLOCK)
        if BY_MASS:
            total += tl.where(keys < limit, softmax_weight(keys.to(tl.float32, bitcast=True), LIBRARY), 0)
        else:
            total += (keys < limit).to(tl.int64)
    return tl.sum(total, axis=0)


@triton.jit
def _span(source, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest and the highest candidate key."""
    low, high = tl.full((BLOCK,), INFINITE, tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, source[1], BLOCK):
        keys = _candidates(source, begin, LIBRARY, BLOCK)
        low, high = tl.minimum(low, keys), tl.maximum(high, tl.where(keys < INFINITE, keys, 0))
    return tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def _search(source, need, low, high, BY_MASS: tl.constexpr, LIBRARY: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key up to which the candidates reach `need`."""
    while low < high:
        middle = low + (high - low) // 2
        enough = _measure(source, middle + 1, BY_MASS, LIBRARY, BLOCK) >= need
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return low


@by_row
def _settle_kernel(
    logits_ptr, best_ptr, edges_ptr, stats_ptr, list_ptr, listed_ptr, limit_ptr, allowed_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, stride, width, parts,
    FEW: tl.constexpr, LIBRARY: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row: kept are the tokens whose key is below `limit`, and of those at it the first `allowed`."""
    row = tl.program_id(0).to(tl.int64)
    limit, allowed = tl.full((), INFINITE, tl.int32), tl.full((), 0, tl.int64)
    cut, peak, temperature, top_k, top_p = _cut_row(
        best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_S
    )
    if cut:
        start, end, count, mass, counted = _last_bracket(edges_ptr, stats_ptr, row, top_k, top_p, FEW)
        listed = tl.load(listed_ptr + row)
        whole = listed > LISTED
        source = (
            list_ptr + row * LISTED, tl.where(whole, width, listed), whole,
            logits_ptr, row, stride, width, peak, temperature, start, end,
        )  # fmt: skip
        low, high = _span(source, LIBRARY, BLOCK)
        total = tl.load(stats_ptr + row * STATS + 2 * EDGES - 1)
        if counted:
            limit = _search(source, top_k - count, low, high, False, LIBRARY, BLOCK)
            allowed = top_k - count - _measure(source, limit, False, LIBRARY, BLOCK)
            high = limit
            if top_p < 1:
                tied = allowed * softmax_weight(limit.to(tl.float32, bitcast=True), LIBRARY)
                total = mass + _measure(source, limit, True, LIBRARY, BLOCK) + tied
        if top_p < 1:
            need = _share(top_p, total) - mass
            limit = _search(source, need, low, high, True, LIBRARY, BLOCK)
            each = softmax_weight(limit.to(tl.float32, bitcast=True), LIBRARY)
            allowed = (need - _measure(source, limit, True, LIBRARY, BLOCK) + each - 1) // each
    tl.store(limit_ptr + row, limit)
    tl.store(allowed_ptr + row, allowed)


@dataclass(frozen=True, slots=True)
class TopKTopP:
    """Scratch of R rows, and what comes of it: kept are the tokens below `limit`, and at it the first `allowed`."""

    low: Tensor  # [R, parts] float32: the lowest finite logit
    edges: Tensor  # [R, 2, EDGES] float32: for each pass
    stats: Tensor  # [R, STATS] int64, zeroed before
    keys: Tensor  # [R, LISTED] int32
    listed: Tensor  # [R] int32: how many keys were to be listed; zeroed before
    limit: Tensor  # [R] int32, a key
    allowed: Tensor  # [R] int64

    @classmethod
    def empty(cls, rows: int, parts: int, listed: int, device: torch.device) -> "TopKTopP":
        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            low=make(rows, parts, dtype=torch.float32),
            edges=make(rows, 2, EDGES.value, dtype=torch.float32),
            stats=make(rows, STATS.value, dtype=torch.int64),
            keys=make(rows, listed, dtype=torch.int32),
            listed=make(rows, dtype=torch.int32),
            limit=make(rows, dtype=torch.int32),
            allowed=make(rows, dtype=torch.int64),
        )


def find_top_k_top_p(logits: Tensor, best: Tensor, params: PlainParams, cuts: TopKTopP, part: int, few: int) -> None:
    """Fills limit and allowed; logits [R, V] float32, best and low by parts of `part` tokens, at most 2048."""
    rows, parts = best.shape
    wish = params.temperature, params.top_k, params.top_p, logits.stride(0), logits.shape[1], parts
    library, block_s = logits.is_cuda, triton.next_power_of_2(parts)
    for index in (0, 1):
        _count_kernel[(parts, rows)](
            logits, best, cuts.low, cuts.edges, cuts.stats, *wish,
            PASS=index, FEW=few, LIBRARY=library, PART=part, TILE=min(part, 512), BLOCK_S=block_s, num_warps=4,
        )  # fmt: skip
    _collect_kernel[(parts, rows)](
        logits, best, cuts.edges, cuts.stats, cuts.keys, cuts.listed, *wish,
        FEW=few, LIBRARY=library, LISTED=cuts.keys.shape[1], PART=part, BLOCK_S=block_s, num_warps=8,
    )  # fmt: skip
    _settle_kernel[(rows,)](
        logits, best, cuts.edges, cuts.stats, cuts.keys, cuts.listed, cuts.limit, cuts.allowed, *wish,
        FEW=few, LIBRARY=library, LISTED=cuts.keys.shape[1], BLOCK=part, BLOCK_S=block_s, num_warps=16,
    )  # fmt: skip
