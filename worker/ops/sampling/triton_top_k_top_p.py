"""Triton kernels that find the exact limits of top-k and top-p without sorting. Many programs share a row.

A token's gap is the distance of its logit from the row's highest logit, divided by the temperature. A token's key is
the bits of its gap as an integer; keys have the same order as gaps. The limit is the largest key to keep. Three kernels
run in order:

    _count_kernel    counts the tokens with gaps below each of a few edges, and sums their weights. If there are many
                     tokens between the two edges that enclose the limit, it counts again, with edges between these two
    _collect_kernel  lists the keys between the two edges that enclose the limit: the candidates
    _limit_kernel    finds the limit by bisection, and how many tokens with this key are kept; one program per row

Top-p may ignore that top-k has dropped tokens: the weight that top-p keeps is a share of the weight that top-k keeps,
so this weight is reached before any dropped token.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from worker.ops.sampling.reference import PlainParams

# Functions for the sampling kernels: a row's highest logit, and the gap, sort key and softmax weight of a token.

ONE = tl.constexpr(float(1 << 40))
LOW_31_BITS = tl.constexpr(0x7FFFFFFF)
LOWEST_INT64 = tl.constexpr(-(1 << 63))
ROW_PARAMETERS = ("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr")
# Kernels with this decorator are not compiled again when a parameter's alignment changes.
jit_unaligned_columns = triton.jit(do_not_specialize_on_alignment=ROW_PARAMETERS)


@triton.jit
def softmax_weight(gap, USE_LIBDEVICE: tl.constexpr):
    """Returns exp(-gap) in units of 2**-40.

    On the same device, libdevice's exp and torch's exp give the same bits. Between devices, the last bit may differ.
    """
    p = libdevice.exp(-gap) if USE_LIBDEVICE else tl.exp(-gap)
    return (p * ONE).to(tl.int64)


@triton.jit
def sortable_bits(x):
    """Converts float32 to int32 with the same order. NaN is highest, as in torch.max; 0.0 and -0.0 become equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, LOW_31_BITS, bits ^ ((bits >> 31) & LOW_31_BITS))


@triton.jit
def row_max(part_max_ptr, row, parts, BLOCK_PARTS: tl.constexpr):
    """Returns the row's highest logit, and the lowest id with this logit."""
    part = tl.arange(0, BLOCK_PARTS)
    packed = tl.max(tl.load(part_max_ptr + row * parts + part, mask=part < parts, other=LOWEST_INT64), axis=0)
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & LOW_31_BITS)).to(tl.float32, bitcast=True), (packed & LOW_31_BITS) ^ LOW_31_BITS


@triton.jit
def is_sampled(max_logit, temperature):
    """Returns whether the row is sampled: that is, it is not greedy, and its highest logit is finite."""
    return (temperature != 0) & (tl.abs(max_logit) < float("inf"))


@triton.jit
def logit_gaps(logits_ptr, row, stride, token_ids, width, max_logit, temperature):
    """Returns each token's gap (max_logit - logit) / temperature, which is >= 0. Its bits are the token's sort key."""
    x = tl.load(logits_ptr + row * stride + token_ids, mask=token_ids < width, other=float("-inf"))
    return tl.div_rn(max_logit - x, temperature)


@triton.jit
def min_p_weight(gap, min_p, USE_LIBDEVICE: tl.constexpr):
    """Returns softmax weights. Tokens that min-p drops have weight zero."""
    weight = softmax_weight(gap, USE_LIBDEVICE)
    return tl.where(weight < (min_p.to(tl.float64) * ONE).to(tl.int64), 0, weight)


MAX_ONE_PASS_CANDIDATES = 2048  # if a row has more candidates, its tokens are counted a second time
MAX_LISTED_KEYS = 16_384  # the most keys that are listed per row; if ties make more, _limit_kernel reads the row again
NUM_EDGES = tl.constexpr(8)
STATS_PER_ROW = tl.constexpr(2 * 2 * 8)  # for each row: a count and a weight for each pass and edge
MAX_GAP = tl.constexpr(28.0)  # tokens with larger gaps have weight zero: exp(-28) < 2**-40
ONE_TOKEN = tl.constexpr(1 << 52)  # the count 1 in integers whose lower bits are a weight (at most 2048 * 2**40)
INFINITE_KEY = tl.constexpr(0x7F800000)  # the key of an infinite gap


@triton.jit
def _weight_for_top_p(top_p, total):
    """Returns the weight that the tokens kept by top-p must reach: between 1 and `total`."""
    need = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(need, 1), total)


@triton.jit
def _element(values, index):
    return tl.sum(tl.where(tl.arange(0, NUM_EDGES) == index, values, 0), axis=0)


@triton.jit
def _candidate_range(edges_ptr, stats_ptr, row, top_k, top_p, PASS: tl.constexpr):
    """Returns the range of gaps [start, end) that contains the limit, from the counts of one pass.

    Returns start and end (an empty range if there is no limit), count and weight of the tokens below start, the number
    of tokens in the range, and whether top-k applies.
    """
    j = tl.arange(0, NUM_EDGES)
    stats = stats_ptr + row * STATS_PER_ROW
    edges = tl.load(edges_ptr + (row * 2 + PASS) * NUM_EDGES + j)
    counts_before = tl.load(stats + PASS * 2 * NUM_EDGES + j)
    weights_before = tl.load(stats + (PASS * 2 + 1) * NUM_EDGES + j)
    row_count, row_weight = tl.load(stats + NUM_EDGES - 1), tl.load(stats + 2 * NUM_EDGES - 1)
    top_k_applies = (top_k > 0) & (top_k < row_count)
    edges_reached = tl.sum((counts_before < top_k).to(tl.int32), axis=0)
    first, last = tl.where(top_k_applies, edges_reached - 1, NUM_EDGES), tl.where(top_k_applies, edges_reached, 0)
    # top-p keeps a share of the weight that top-k keeps, of which only a lower and an upper bound are known
    if top_p < 1:
        least = tl.where(top_k_applies, tl.maximum(_element(weights_before, first), 1), row_weight)
        most = tl.where(top_k_applies, _element(weights_before, last), row_weight)
        first = tl.minimum(first, tl.sum((weights_before < _weight_for_top_p(top_p, least)).to(tl.int32), axis=0) - 1)
        last = tl.maximum(last, tl.sum((weights_before < _weight_for_top_p(top_p, most)).to(tl.int32), axis=0))
    first = tl.minimum(first, last)
    count_before = _element(counts_before, first)
    between = _element(counts_before, last) - _element(counts_before, first)
    start, end, weight_before = _element(edges, first), _element(edges, last), _element(weights_before, first)
    return start, end, count_before, weight_before, between, top_k_applies


@triton.jit
def _final_candidate_range(edges_ptr, stats_ptr, row, top_k, top_p, MAX_ONE_PASS_CANDIDATES: tl.constexpr):
    """Returns the same as _candidate_range without the number of tokens. It uses the first pass if the range of that
    pass has few enough tokens, else the second pass.
    """
    start, end, count_before, weight_before, between, top_k_applies = _candidate_range(
        edges_ptr, stats_ptr, row, top_k, top_p, 0
    )
    if between > MAX_ONE_PASS_CANDIDATES:
        start, end, count_before, weight_before, between, top_k_applies = _candidate_range(
            edges_ptr, stats_ptr, row, top_k, top_p, 1
        )
    return start, end, count_before, weight_before, top_k_applies


@triton.jit
def _load_row(part_max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_PARTS: tl.constexpr):
    """Returns whether top-k or top-p may apply to the row, the row's highest logit, and its parameters."""
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    max_logit, _ = row_max(part_max_ptr, row, parts, BLOCK_PARTS)
    filtered = is_sampled(max_logit, temperature) & (((top_k > 0) & (top_k < width)) | (top_p < 1))
    return filtered, max_logit, temperature, top_k, top_p


@triton.jit
def _spread_edges(top, start, end):
    """Returns NUM_EDGES edges: the first is start, the last is end, the others are evenly spaced from start to top."""
    j = tl.arange(0, NUM_EDGES)
    edges = tl.fma(j.to(tl.float32), (top - start) / (NUM_EDGES - 1), start)
    return tl.where(j == NUM_EDGES - 1, end, tl.minimum(edges, end))


@jit_unaligned_columns
def _count_kernel(
    logits_ptr, part_max_ptr, part_min_ptr, edges_ptr, stats_ptr, temperature_ptr, top_k_ptr, top_p_ptr, stride,
    width, parts,
    PASS: tl.constexpr, MAX_ONE_PASS_CANDIDATES: tl.constexpr, USE_LIBDEVICE: tl.constexpr, PART_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Adds the tokens of one part to the row's count and weight below each edge, except tokens with weight zero."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    filtered, max_logit, temperature, top_k, top_p = _load_row(
        part_max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_PARTS
    )
    start, end = 0.0, float("inf")
    if PASS == 1:
        start, end, _, _, between, _ = _candidate_range(edges_ptr, stats_ptr, row, top_k, top_p, 0)
        filtered &= between > MAX_ONE_PASS_CANDIDATES
    if filtered:
        part_index, j = tl.arange(0, BLOCK_PARTS), tl.arange(0, NUM_EDGES)
        minima = tl.load(part_min_ptr + row * parts + part_index, mask=part_index < parts, other=float("inf"))
        farthest_gap = tl.minimum(tl.div_rn(max_logit - tl.min(minima, axis=0), temperature), MAX_GAP)
        edges = _spread_edges(tl.minimum(end, farthest_gap), start, end)
        if part == 0:
            tl.store(edges_ptr + (row * 2 + PASS) * NUM_EDGES + j, edges)
        totals = tl.zeros((NUM_EDGES,), tl.int64)
        for begin in range(0, PART_SIZE, TILE):
            token_ids = part * PART_SIZE + begin + tl.arange(0, TILE)
            gap = logit_gaps(logits_ptr, row, stride, token_ids, width, max_logit, temperature)
            weight = softmax_weight(gap, USE_LIBDEVICE)
            count_and_weight = tl.where(weight > 0, weight + ONE_TOKEN, 0)
            totals += tl.sum(tl.where(gap[:, None] < edges[None, :], count_and_weight[:, None], 0), axis=0)
        stats = stats_ptr + row * STATS_PER_ROW + PASS * 2 * NUM_EDGES + j
        tl.atomic_add(stats, (totals >> 52) & 0xFFF, sem="relaxed")
        tl.atomic_add(stats + NUM_EDGES, totals & (ONE_TOKEN - 1), sem="relaxed")


@jit_unaligned_columns
def _collect_kernel(
    logits_ptr, part_max_ptr, edges_ptr, stats_ptr, list_ptr, listed_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    stride, width, parts,
    MAX_ONE_PASS_CANDIDATES: tl.constexpr, USE_LIBDEVICE: tl.constexpr, MAX_LISTED_KEYS: tl.constexpr,
    PART_SIZE: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Appends the candidates of one part to the row's list, in arbitrary order."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    filtered, max_logit, temperature, top_k, top_p = _load_row(
        part_max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_PARTS
    )
    if filtered:
        start, end, _, _, _ = _final_candidate_range(edges_ptr, stats_ptr, row, top_k, top_p, MAX_ONE_PASS_CANDIDATES)
        token_ids = part * PART_SIZE + tl.arange(0, PART_SIZE)
        gap = logit_gaps(logits_ptr, row, stride, token_ids, width, max_logit, temperature)
        is_candidate = ((gap >= start) & (gap < end) & (softmax_weight(gap, USE_LIBDEVICE) > 0)).to(tl.int32)
        count = tl.sum(is_candidate, axis=0)
        if count > 0:
            at = tl.atomic_add(listed_ptr + row, count, sem="relaxed") + tl.cumsum(is_candidate, axis=0) - 1
            keys = gap.to(tl.int32, bitcast=True)
            tl.store(list_ptr + row * MAX_LISTED_KEYS + at, keys, mask=(is_candidate > 0) & (at < MAX_LISTED_KEYS))


@triton.jit
def _load_candidates(source, begin, USE_LIBDEVICE: tl.constexpr, BLOCK: tl.constexpr):
    """Loads a block of the row's candidate keys. Tokens that are no candidates get INFINITE_KEY."""
    list_ptr, count, rescan_row, logits_ptr, row, stride, width, max_logit, temperature, start, end = source
    token_ids = begin + tl.arange(0, BLOCK)
    if rescan_row:
        gap = logit_gaps(logits_ptr, row, stride, token_ids, width, max_logit, temperature)
        is_candidate = (gap >= start) & (gap < end) & (softmax_weight(gap, USE_LIBDEVICE) > 0)
        keys = tl.where(is_candidate, gap.to(tl.int32, bitcast=True), INFINITE_KEY)
    else:
        keys = tl.load(list_ptr + token_ids, mask=token_ids < count, other=INFINITE_KEY)
    return keys


@triton.jit
def _count_or_weight_below(source, limit, BY_WEIGHT: tl.constexpr, USE_LIBDEVICE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the count, or with BY_WEIGHT the weight, of the candidates whose key is below `limit`."""
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, source[1], BLOCK):
        keys = _load_candidates(source, begin, USE_LIBDEVICE, BLOCK)
        if BY_WEIGHT:
            total += tl.where(keys < limit, softmax_weight(keys.to(tl.float32, bitcast=True), USE_LIBDEVICE), 0)
        else:
            total += (keys < limit).to(tl.int64)
    return tl.sum(total, axis=0)


@triton.jit
def _key_range(source, USE_LIBDEVICE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the lowest and the highest candidate key."""
    low, high = tl.full((BLOCK,), INFINITE_KEY, tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, source[1], BLOCK):
        keys = _load_candidates(source, begin, USE_LIBDEVICE, BLOCK)
        low, high = tl.minimum(low, keys), tl.maximum(high, tl.where(keys < INFINITE_KEY, keys, 0))
    return tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit
def _bisect(source, need, low, high, BY_WEIGHT: tl.constexpr, USE_LIBDEVICE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the lowest key for which the candidates up to and including this key reach the count or weight `need`."""
    while low < high:
        middle = low + (high - low) // 2
        enough = _count_or_weight_below(source, middle + 1, BY_WEIGHT, USE_LIBDEVICE, BLOCK) >= need
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return low


@jit_unaligned_columns
def _limit_kernel(
    logits_ptr, part_max_ptr, edges_ptr, stats_ptr, list_ptr, listed_ptr, limit_ptr, allowed_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, stride, width, parts,
    MAX_ONE_PASS_CANDIDATES: tl.constexpr, USE_LIBDEVICE: tl.constexpr, MAX_LISTED_KEYS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Finds `limit` and `allowed` of one row.

    The tokens to keep have keys below `limit`, or are among the first `allowed` tokens with the key `limit`.
    """
    row = tl.program_id(0).to(tl.int64)
    limit, allowed = tl.full((), INFINITE_KEY, tl.int32), tl.full((), 0, tl.int64)
    filtered, max_logit, temperature, top_k, top_p = _load_row(
        part_max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row, parts, width, BLOCK_PARTS
    )
    if filtered:
        start, end, count_before, weight_before, top_k_applies = _final_candidate_range(
            edges_ptr, stats_ptr, row, top_k, top_p, MAX_ONE_PASS_CANDIDATES
        )
        listed = tl.load(listed_ptr + row)
        rescan_row = listed > MAX_LISTED_KEYS
        source = (
            list_ptr + row * MAX_LISTED_KEYS, tl.where(rescan_row, width, listed), rescan_row,
            logits_ptr, row, stride, width, max_logit, temperature, start, end,
        )  # fmt: skip
        low, high = _key_range(source, USE_LIBDEVICE, BLOCK)
        total = tl.load(stats_ptr + row * STATS_PER_ROW + 2 * NUM_EDGES - 1)
        if top_k_applies:
            limit = _bisect(source, top_k - count_before, low, high, False, USE_LIBDEVICE, BLOCK)
            allowed = top_k - count_before - _count_or_weight_below(source, limit, False, USE_LIBDEVICE, BLOCK)
            high = limit
            if top_p < 1:
                tied = allowed * softmax_weight(limit.to(tl.float32, bitcast=True), USE_LIBDEVICE)
                total = weight_before + _count_or_weight_below(source, limit, True, USE_LIBDEVICE, BLOCK) + tied
        if top_p < 1:
            need = _weight_for_top_p(top_p, total) - weight_before
            limit = _bisect(source, need, low, high, True, USE_LIBDEVICE, BLOCK)
            tie_weight = softmax_weight(limit.to(tl.float32, bitcast=True), USE_LIBDEVICE)
            missing = need - _count_or_weight_below(source, limit, True, USE_LIBDEVICE, BLOCK)
            allowed = (missing + tie_weight - 1) // tie_weight
    tl.store(limit_ptr + row, limit)
    tl.store(allowed_ptr + row, allowed)


@dataclass(frozen=True, slots=True)
class TopKTopP:
    """The kernels' buffers for R rows, and their result: `limit` and `allowed`.

    The tokens to keep have keys below `limit`, or are among the first `allowed` tokens with the key `limit`.
    """

    part_min: Tensor  # [R, parts] float32: the lowest finite logit of each part
    edges: Tensor  # [R, 2, NUM_EDGES] float32: the edges of each pass
    stats: Tensor  # [R, STATS_PER_ROW] int64; must be zero before the first kernel
    keys: Tensor  # [R, max_listed] int32: the candidates
    listed: Tensor  # [R] int32: how many candidates there are; must be zero before the first kernel
    limit: Tensor  # [R] int32: a key
    allowed: Tensor  # [R] int64

    @classmethod
    def empty(cls, rows: int, parts: int, max_listed: int, device: torch.device) -> "TopKTopP":
        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            part_min=make(rows, parts, dtype=torch.float32),
            edges=make(rows, 2, NUM_EDGES.value, dtype=torch.float32),
            stats=make(rows, STATS_PER_ROW.value, dtype=torch.int64),
            keys=make(rows, max_listed, dtype=torch.int32),
            listed=make(rows, dtype=torch.int32),
            limit=make(rows, dtype=torch.int32),
            allowed=make(rows, dtype=torch.int64),
        )


def find_top_k_top_p(
    logits: Tensor, part_max: Tensor, params: PlainParams, filters: TopKTopP, part_size: int, max_one_pass: int
) -> None:
    """Fills filters.limit and filters.allowed. logits [R, V] float32

    part_max and filters.part_min have one value for each part of `part_size` tokens, which is at most 2048.
    """
    rows, parts = part_max.shape
    row_params = params.temperature, params.top_k, params.top_p, logits.stride(0), logits.shape[1], parts
    use_libdevice, block_parts = logits.is_cuda, triton.next_power_of_2(parts)
    for index in (0, 1):
        _count_kernel[(parts, rows)](
            logits, part_max, filters.part_min, filters.edges, filters.stats, *row_params,
            PASS=index, MAX_ONE_PASS_CANDIDATES=max_one_pass, USE_LIBDEVICE=use_libdevice, PART_SIZE=part_size,
            TILE=min(part_size, 512), BLOCK_PARTS=block_parts, num_warps=4,
        )  # fmt: skip
    _collect_kernel[(parts, rows)](
        logits, part_max, filters.edges, filters.stats, filters.keys, filters.listed, *row_params,
        MAX_ONE_PASS_CANDIDATES=max_one_pass, USE_LIBDEVICE=use_libdevice, MAX_LISTED_KEYS=filters.keys.shape[1],
        PART_SIZE=part_size, BLOCK_PARTS=block_parts, num_warps=8,
    )  # fmt: skip
    _limit_kernel[(rows,)](
        logits, part_max, filters.edges, filters.stats, filters.keys, filters.listed, filters.limit, filters.allowed,
        *row_params,
        MAX_ONE_PASS_CANDIDATES=max_one_pass, USE_LIBDEVICE=use_libdevice, MAX_LISTED_KEYS=filters.keys.shape[1],
        BLOCK=part_size, BLOCK_PARTS=block_parts, num_warps=16,
    )  # fmt: skip
