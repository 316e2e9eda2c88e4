"""The Triton kernels of attention.py: one for decodes, one that puts their splits together, one for all longer pieces.

Why a row's bits never depend on the batch, the chunking, padding or how the work is dealt out. A row's keys are cut at
absolute positions: into splits (`split_start`), and those into blocks of BLOCK_N. Each split is attended from scratch
by `_attend_block` (online softmax over its blocks, in order), and the splits are joined by `_join`, in order. A block
or split without a key for the row changes nothing, to the bit: it multiplies by one and adds zero. A sequence with one
row has its splits attended by different programs, left in memory and joined by `_combine_kernel`; every other row has
them attended and joined by one program: the same functions, the same order.

The two attending kernels differ in the height of their tile, not in what a row goes through: its products come from
the same instruction (64 rows for a group of four warps, as many columns, 16 deep), over the same columns in the same
order, and its maximum and sum from the same four lanes. Where four warps cannot hold 64 rows of two sums (heads above
128), and without tensor cores (float32), both use the same tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.key_splits import begins_split, count_splits, split_index, split_start

SPLIT = 256  # positions of a split near the sequence's beginning; a multiple of every block_n
NEAR = 32  # splits of that length, see splits_triton.py: what is left in memory for each must not grow for ever
DECODE_PROGRAMS, LEAST_WORKERS = 16384, 8  # of a launch and of one head, where there are as many splits
AHEAD = 8  # splits whose partial sums are read at once when they are joined
EXACT = {"enable_fp_fusion": False}  # sums and products as written, in every kernel
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """Keys of a block; lanes (query rows times heads of a group), warps and pipeline stages of the two kernels."""

    block_n: int
    prefill_m: int
    prefill_warps: int
    decode_m: int
    decode_warps: int
    stages: int


def tiles_for(head: int, group: int, dtype: torch.dtype) -> Tiles:
    """What suits an H200. Keys and values come two blocks ahead, and two before them their pages: five stages."""
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:
        return Tiles(32, max(16, least), 4, max(16, least), 4, 1)
    if head > 128:
        return Tiles(32, max(64, least), 8, max(64, least), 8, 5)
    return Tiles(128 if head <= 64 else 64, max(128, least), 8, max(64, least), 4 if least <= 64 else 8, 5)


@triton.jit
def _join(peak, mass, total, peak_2, mass_2, total_2, scale):
    """Two partial softmaxes of the same rows -> one. peak, mass [M]; total [M, D]; an empty one has peak -inf."""
    highest = tl.maximum(peak, peak_2)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2((peak - base) * scale)
    weight_2 = tl.exp2((peak_2 - base) * scale)
    mass = tl.fma(mass, weight, mass_2 * weight_2)
    total = tl.fma(total, tl.zeros_like(total) + weight[:, None], total_2 * weight_2[:, None])
    return highest, mass, total


@triton.jit
def _empty(M: tl.constexpr, D: tl.constexpr):
    """The partial softmax of no keys."""
    peak = tl.full((M,), float("-inf"), dtype=tl.float32)
    return peak, tl.zeros((M,), dtype=tl.float32), tl.zeros((M, D), dtype=tl.float32)


@triton.jit
def _token_offsets(page_table_ptr, start, end, TOKEN: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the cache holds positions start .. start + BLOCK_N - 1, in elements; start a multiple of BLOCK_N. int64."""
    offset = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:  # one page
        page = tl.load(page_table_ptr + start // PAGE).to(tl.int64)
        return (page * PAGE + start % PAGE) * TOKEN + offset * TOKEN
    if BLOCK_N % PAGE == 0 and BLOCK_N <= 4 * PAGE:  # a few whole pages
        page = tl.zeros((BLOCK_N,), dtype=tl.int64)
        for index in tl.static_range(BLOCK_N // PAGE):
            one = tl.load(page_table_ptr + start // PAGE + index, mask=start + index * PAGE < end, other=0)
            page = tl.where(offset // PAGE == index, one.to(tl.int64), page)
        return page * (PAGE * TOKEN) + offset % PAGE * TOKEN
    where = start + offset
    page = tl.load(page_table_ptr + where // PAGE, mask=where < end, other=0).to(tl.int64)
    return (page * PAGE + where % PAGE) * TOKEN


@triton.jit
def _attend_block(
    q, peak, mass, total, k_ptr, v_ptr, page_table_ptr, at, lowest, highest_at, start, end, scale, window,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds keys start .. start + BLOCK_N - 1, as far as below `end`, to q's partial softmax.

    q [M, D] at positions `at` [M], of which those that count lie in lowest .. highest_at < end.
    """
    column, where = tl.arange(0, BLOCK_D), start + tl.arange(0, BLOCK_N)
    inside = where < end
    wanted = inside[:, None]
    if HEAD < BLOCK_D:
        wanted = wanted & (column < HEAD)[None, :]
    offsets = _token_offsets(page_table_ptr, start, end, TOKEN, PAGE, BLOCK_N)[:, None] + column[None, :]
    k = tl.load(k_ptr + offsets, mask=wanted, other=0.0).to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
    if (start + BLOCK_N > lowest + 1) | (start <= highest_at - window):  # not all see all
        seen = (where[None, :] <= at[:, None]) & (where[None, :] > at[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    highest = tl.maximum(peak, tl.max(score, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(tl.fma(score, tl.zeros_like(score) + scale, tl.zeros_like(score) - (base * scale)[:, None]))
    weight = tl.exp2((peak - base) * scale)
    mass = tl.fma(mass, weight, tl.sum(p, axis=1))
    v = tl.load(v_ptr + offsets, mask=wanted, other=0.0).to(q.dtype)
    total = tl.dot(p.to(q.dtype), v, total * weight[:, None], input_precision="ieee")
    return highest, mass, total


@triton.jit(do_not_specialize=["window", "page_table_stride", "parts"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, peak_ptr, mass_ptr, total_ptr, query_start_loc_ptr, seq_lens_ptr, page_table_ptr,
    scale, window, page_table_stride, q_stride, parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a split of a single-row sequence for the query heads of one key/value head, left in memory.

    Where a sequence has more splits than programs, each takes every so manyeth.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, worker, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
    q_len = tl.load(query_start_loc_ptr + sequence + 1) - row
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_key = tl.maximum(seq_len - window, 0)
    first = split_index(first_key, SPLIT, NEAR, EVEN)
    count = split_index(seq_len - 1, SPLIT, NEAR, EVEN) + 1 - first
    if (q_len == 1) & (worker < count):
        lane, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        head, mine = kv_head * GROUP + lane, lane < GROUP
        inside = mine[:, None] & (column < HEAD)[None, :]
        q = tl.load(q_ptr + row * q_stride + head[:, None] * HEAD + column[None, :], mask=inside, other=0.0)
        at = tl.full((BLOCK_M,), 0, dtype=tl.int32) + (seq_len - 1)
        for split in range(worker, count, tl.num_programs(1)):
            begin = tl.maximum(split_start(first + split, SPLIT, NEAR, EVEN), first_key // BLOCK_N * BLOCK_N)
            end = tl.minimum(split_start(first + split + 1, SPLIT, NEAR, EVEN), seq_len)
            peak, mass, total = _empty(BLOCK_M, BLOCK_D)
            for start in range(begin, end, BLOCK_N):
                peak, mass, total = _attend_block(
                    q, peak, mass, total, k_ptr + kv_head * HEAD, v_ptr + kv_head * HEAD,
                    page_table_ptr + sequence * page_table_stride, at, seq_len - 1, seq_len - 1, start, end,
                    scale, window, KV_HEADS * HEAD, HEAD, PAGE, BLOCK_D, BLOCK_N,
                )  # fmt: skip
            part = (sequence * parts + split) * HEADS + head
            tl.store(peak_ptr + part, peak, mask=mine)
            tl.store(mass_ptr + part, mass, mask=mine)
            tl.store(total_ptr + part[:, None] * HEAD + column[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["window", "parts"])
def _combine_kernel(
    peak_ptr, mass_ptr, total_ptr, out_ptr, query_start_loc_ptr, seq_lens_ptr, scale, window, parts,
    HEADS: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program joins the splits of one single-row sequence for one query head; AHEAD of them are read at once."""
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
    if tl.load(query_start_loc_ptr + sequence + 1) - row == 1:
        seq_len = tl.load(seq_lens_ptr + sequence)
        column, one = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, 1)
        first = split_index(tl.maximum(seq_len - window, 0), SPLIT, NEAR, EVEN)
        count = split_index(seq_len - 1, SPLIT, NEAR, EVEN) + 1 - first
        peak, mass, total = _empty(1, BLOCK_D)
        for begin in range(0, count, AHEAD):
            for ahead in tl.static_range(AHEAD):
                there = begin + ahead < count
                part = (sequence * parts + begin + ahead) * HEADS + head + one
                peak_2 = tl.load(peak_ptr + part, mask=there & (one == 0), other=float("-inf"))
                mass_2 = tl.load(mass_ptr + part, mask=there & (one == 0), other=0.0)
                total_2 = tl.load(total_ptr + part[:, None] * HEAD + column, mask=there & (column < HEAD), other=0.0)
                peak, mass, total = _join(peak, mass, total, peak_2, mass_2, total_2, scale)
        out = (total / mass[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * HEADS + head) * HEAD + column, out, mask=column < HEAD)


@triton.jit
def _find_sequence(query_start_loc_ptr, sequences, tile, ROWS: tl.constexpr):
    """The sequence of a tile. Sequence s has the tiles from query_start_loc[s] // ROWS + s on.

    Some of the tiles may have no row.
    """
    BLOCK: tl.constexpr = 256
    found = 0
    for base in range(0, sequences, BLOCK):
        index = base + tl.arange(0, BLOCK)
        first = tl.load(query_start_loc_ptr + index, mask=index < sequences, other=0) // ROWS + index
        found += tl.sum(((first <= tile) & (index < sequences)).to(tl.int32))
    return found - 1


@triton.jit(do_not_specialize=["window", "page_table_stride", "sequences"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, query_start_loc_ptr, seq_lens_ptr, page_table_ptr,
    scale, window, page_table_stride, q_stride, sequences,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of a sequence that has several, times the query heads of one key/value head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # a sequence's longest first
    sequence = _find_sequence(query_start_loc_ptr, sequences, tile, ROWS).to(tl.int64)
    begin_row = tl.load(query_start_loc_ptr + sequence)
    q_len = tl.load(query_start_loc_ptr + sequence + 1) - begin_row
    first_row = (tile - begin_row // ROWS - sequence.to(tl.int32)) * ROWS
    if (q_len > 1) & (first_row < q_len):
        before = tl.load(seq_lens_ptr + sequence) - q_len
        lane, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        row, head = first_row + lane // GROUP, kv_head * GROUP + lane % GROUP
        mine = (lane < ROWS * GROUP) & (row < q_len)
        inside = mine[:, None] & (column < HEAD)[None, :]
        token = begin_row.to(tl.int64) + row
        q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * HEAD + column[None, :], mask=inside, other=0.0)
        last_row = tl.minimum(first_row + ROWS, q_len) - 1
        begin = tl.maximum(before + first_row - window + 1, 0) // BLOCK_N * BLOCK_N
        peak, mass, total = _empty(BLOCK_M, BLOCK_D)
        peak_2, mass_2, total_2 = _empty(BLOCK_M, BLOCK_D)
        for start in range(begin, before + last_row + 1, BLOCK_N):
            # not at the loop's foot: Triton does not wait for a product there before its sum is read
            if begins_split(start, SPLIT, NEAR, EVEN):
                peak, mass, total = _join(peak, mass, total, peak_2, mass_2, total_2, scale)
                peak_2, mass_2, total_2 = _empty(BLOCK_M, BLOCK_D)
            peak_2, mass_2, total_2 = _attend_block(
                q, peak_2, mass_2, total_2, k_ptr + kv_head * HEAD, v_ptr + kv_head * HEAD,
                page_table_ptr + sequence * page_table_stride, before + row, before + first_row, before + last_row,
                start, before + last_row + 1, scale, window, KV_HEADS * HEAD, HEAD, PAGE, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        peak, mass, total = _join(peak, mass, total, peak_2, mass_2, total_2, scale)
        out = (total / tl.where(mine, mass, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token[:, None] * HEADS + head[:, None]) * HEAD + column[None, :], out, mask=inside)


def attention_triton(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_kv_len: int,
    *,
    scale: float,
    window: int,
) -> Tensor:
    """As `attention.attention_torch`; max_kv_len is at least every seq_len.

    Reads no tensor on the host: what is launched follows from the shapes and max_kv_len, the bits do not.
    """
    tokens, heads, head = q.shape
    page, kv_heads = cache_k.shape[1:3]
    sequences = len(seq_lens)
    assert q.stride()[1:] == (head, 1) and 0 < sequences <= tokens and scale > 0
    _check_caches(q, cache_k, cache_v)
    _check_layout(query_start_loc, seq_lens, page_table)
    out = torch.empty(tokens, heads, head, dtype=q.dtype, device=q.device)
    common: dict[str, int | bool] = EXACT | {
        "HEADS": heads, "HEAD": head, "SPLIT": SPLIT, "NEAR": NEAR, "EVEN": window > 0,
        "BLOCK_D": max(16, triton.next_power_of_2(head)),
    }  # fmt: skip
    tiles = tiles_for(head, heads // kv_heads, q.dtype)
    cache = {"KV_HEADS": kv_heads, "PAGE": page, "BLOCK_N": tiles.block_n}
    scaled, reach = scale * LOG2_E, window or 1 << 30
    if tokens > sequences:  # some sequence has several rows
        rows = tiles.prefill_m // (heads // kv_heads)
        _prefill_kernel[(kv_heads, tokens // rows + sequences)](
            q, cache_k, cache_v, out, query_start_loc, seq_lens, page_table,
            scaled, reach, page_table.stride(0), q.stride(0), sequences,
            ROWS=rows, BLOCK_M=tiles.prefill_m, num_warps=tiles.prefill_warps, num_stages=tiles.stages,
            **common, **cache,
        )  # fmt: skip
    if sequences > 1 or tokens == 1:  # some may have one
        parts = count_splits(max_kv_len, window, SPLIT, NEAR)
        peak, mass = (torch.empty(sequences * parts * heads, dtype=torch.float32, device=q.device) for _ in "pm")
        total = torch.empty(sequences * parts * heads * head, dtype=torch.float32, device=q.device)
        workers = min(parts, max(LEAST_WORKERS, DECODE_PROGRAMS // (sequences * kv_heads)))
        _decode_kernel[(kv_heads, workers, sequences)](
            q, cache_k, cache_v, peak, mass, total, query_start_loc, seq_lens, page_table,
            scaled, reach, page_table.stride(0), q.stride(0), parts,
            BLOCK_M=tiles.decode_m, num_warps=tiles.decode_warps, num_stages=tiles.stages,
            **common, **cache,
        )  # fmt: skip
        _combine_kernel[(heads, sequences)](
            peak, mass, total, out, query_start_loc, seq_lens, scaled, reach, parts, AHEAD=AHEAD, num_warps=1, **common
        )
    return out


def _check_caches(q: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
    assert cache_v.shape == cache_k.shape and cache_k.shape[3] == q.shape[2] and q.shape[1] % cache_k.shape[2] == 0
    assert cache_k.is_contiguous() and cache_v.is_contiguous()
    assert cache_k.dtype == cache_v.dtype and cache_k.dtype in (q.dtype, torch.float8_e4m3fn)


def _check_layout(query_start_loc: Tensor, seq_lens: Tensor, page_table: Tensor) -> None:
    sequences = len(seq_lens)
    assert query_start_loc.shape == (sequences + 1,) and page_table.shape[0] == sequences and page_table.stride(1) == 1
    assert query_start_loc.is_contiguous() and seq_lens.is_contiguous()
    assert query_start_loc.dtype == seq_lens.dtype == page_table.dtype == torch.int32
