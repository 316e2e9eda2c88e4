"""The Triton kernels of attention.py: one for prefill, chunk and decode, and one that puts split decodes together.

Why a row's bits never depend on the batch or the chunking. A row's keys are cut at absolute positions: into splits of
SPLIT positions, and those into blocks. Each split is attended from scratch by `_attend_split` (online softmax over its
blocks, in order), and the splits are joined by `_join`, in order. A block or split without a key for the row changes
nothing, to the bit: it multiplies by one and adds zero. A sequence with a single row has its splits computed by
different programs and joined by `_combine_kernel`; every other row has them computed and joined by one program: the
same functions, the same order. Tile height depends on the head counts only, so the same instructions run throughout.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16  # query rows of an entry of `tiles`
SPLIT = 512  # positions
MAX_PARALLEL = 64  # programs that share the splits of one decode
LOG2_E = 1.4426950408889634


@triton.jit
def _join(peak, mass, total, peak_2, mass_2, total_2, scale):
    """Two partial softmaxes of the same rows -> one. peak, mass [M]; total [M, D]; an empty one has peak -inf."""
    highest = tl.maximum(peak, peak_2)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2((peak - base) * scale)
    weight_2 = tl.exp2((peak_2 - base) * scale)
    mass = tl.fma(mass, weight, mass_2 * weight_2)  # fma by hand: the compiler's choice could differ between kernels
    total = tl.fma(total, tl.zeros_like(total) + weight[:, None], total_2 * weight_2[:, None])
    return highest, mass, total


@triton.jit
def _attend_split(
    q, k_ptr, v_ptr, pages_ptr, at, begin, end, scale, window, token_stride,
    HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """q [M, D] at positions `at` [M] against the keys of positions begin .. end - 1 -> (peak, mass, total)."""
    column = tl.arange(0, BLOCK_D)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    mass = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        where = start + tl.arange(0, BLOCK_N)
        inside = where < end
        page = tl.load(pages_ptr + where // PAGE, mask=inside, other=0).to(tl.int64)
        slot = (page * PAGE + where % PAGE) * token_stride
        k = tl.load(k_ptr + slot[None, :] + column[:, None], mask=inside[None, :] & (column < HEAD)[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee")  # [M, N]
        seen = inside[None, :] & (where[None, :] <= at[:, None]) & (where[None, :] > at[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(peak, tl.max(score, axis=1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp2((score - base[:, None]) * scale)
        weight = tl.exp2((peak - base) * scale)
        mass = tl.fma(mass, weight, tl.sum(p, axis=1))
        v = tl.load(v_ptr + slot[:, None] + column[None, :], mask=inside[:, None] & (column < HEAD)[None, :], other=0.0)
        total = tl.dot(p.to(v.dtype), v, total * weight[:, None], input_precision="ieee")
        peak = highest
    return peak, mass, total


@triton.jit
def _keep_part(peak_ptr, mass_ptr, total_ptr, part, peak, mass, total, mine, HEAD: tl.constexpr, BLOCK_D: tl.constexpr):
    """Leave one split's partial softmax of the rows `mine` at entries `part` [M]."""
    column = tl.arange(0, BLOCK_D)
    inside = mine[:, None] & (column < HEAD)[None, :]
    tl.store(peak_ptr + part, peak, mask=mine)
    tl.store(mass_ptr + part, mass, mask=mine)
    tl.store(total_ptr + part[:, None] * HEAD + column[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["window", "pages_stride", "parts"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, peak_ptr, mass_ptr, total_ptr,
    starts_ptr, kv_lens_ptr, pages_ptr, tiles_ptr,
    scale, window, pages_stride, q_stride, parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one sequence times the query heads of one key/value head.

    With parts > 1 a sequence of one row has its splits dealt out over program_id(2), each left for _combine_kernel.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, worker = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = tiles_ptr + (tile // (TILE // ROWS)) * 2
    sequence = tl.load(entry).to(tl.int64)
    first_row = tl.load(entry + 1) + (tile % (TILE // ROWS)) * ROWS
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    q_len = (tl.load(starts_ptr + sequence + 1) - start).to(tl.int32)
    kv_len = tl.load(kv_lens_ptr + sequence)
    alone = (q_len == 1) & (parts > 1)
    if (first_row < q_len) & ((worker == 0) | alone):
        lane, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        row, head = first_row + lane // GROUP, kv_head * GROUP + lane % GROUP
        mine = (lane < ROWS * GROUP) & (row < q_len)
        at = kv_len - q_len + row
        inside = mine[:, None] & (column < HEAD)[None, :]
        q_at = (start + row)[:, None] * q_stride + head[:, None] * HEAD + column[None, :]
        q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
        first_key = tl.maximum(kv_len - q_len + first_row - window + 1, 0)
        end_key = tl.minimum(kv_len - q_len + first_row + ROWS, kv_len)
        first_split = first_key // SPLIT
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        mass = tl.zeros((BLOCK_M,), dtype=tl.float32)
        total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for split in range(first_split + worker, tl.cdiv(end_key, SPLIT), tl.where(alone, tl.num_programs(2), 1)):
            peak_2, mass_2, total_2 = _attend_split(
                q, k_ptr + kv_head * HEAD, v_ptr + kv_head * HEAD, pages_ptr + sequence * pages_stride, at,
                tl.maximum(split * SPLIT, first_key // BLOCK_N * BLOCK_N), tl.minimum(split * SPLIT + SPLIT, end_key),
                scale, window, KV_HEADS * HEAD, HEAD, BLOCK_D, BLOCK_M, BLOCK_N, PAGE,
            )  # fmt: skip
            if alone:
                part = (sequence * parts + split - first_split) * HEADS + head
                _keep_part(peak_ptr, mass_ptr, total_ptr, part, peak_2, mass_2, total_2, mine, HEAD, BLOCK_D)
            peak, mass, total = _join(peak, mass, total, peak_2, mass_2, total_2, scale)
        if not alone:
            out = (total / tl.where(mine, mass, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
            out_at = ((start + row)[:, None] * HEADS + head[:, None]) * HEAD + column[None, :]
            tl.store(out_ptr + out_at, out, mask=inside)


@triton.jit(do_not_specialize=["window", "parts"])
def _combine_kernel(
    peak_ptr, mass_ptr, total_ptr, out_ptr, starts_ptr, kv_lens_ptr, scale, window, parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program joins the splits of one single-row sequence for the query heads of one key/value head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    if tl.load(starts_ptr + sequence + 1) - start == 1:
        kv_len = tl.load(kv_lens_ptr + sequence)
        lane, column = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + lane
        mine = lane < GROUP
        inside = mine[:, None] & (column < HEAD)[None, :]
        peak = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
        mass = tl.zeros((BLOCK_G,), dtype=tl.float32)
        total = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
        first_split = tl.maximum(kv_len - window, 0) // SPLIT
        for split in range(first_split, tl.cdiv(kv_len, SPLIT)):
            part = (sequence.to(tl.int64) * parts + split - first_split) * HEADS + head
            peak_2 = tl.load(peak_ptr + part, mask=mine, other=0.0)
            mass_2 = tl.load(mass_ptr + part, mask=mine, other=0.0)
            total_2 = tl.load(total_ptr + part[:, None] * HEAD + column[None, :], mask=inside, other=0.0)
            peak, mass, total = _join(peak, mass, total, peak_2, mass_2, total_2, scale)
        out = (total / tl.where(mine, mass, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (start * HEADS + head[:, None]) * HEAD + column[None, :], out, mask=inside)


def attention_triton(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    starts: Tensor,
    kv_lens: Tensor,
    pages: Tensor,
    tiles: Tensor,
    max_kv: int,
    *,
    scale: float,
    window: int,
) -> Tensor:
    tokens, heads, head = q.shape
    page, kv_heads = cache_k.shape[1:3]
    sequences = len(kv_lens)
    assert cache_v.shape == cache_k.shape and cache_k.shape[3] == head and heads % kv_heads == 0
    assert cache_k.is_contiguous() and cache_v.is_contiguous() and q.stride()[1:] == (head, 1) and scale > 0
    assert starts.shape == (sequences + 1,) and pages.shape[0] == sequences and pages.stride(1) == 1
    assert tiles.shape[1:] == (2,) and tiles.is_contiguous()
    assert starts.dtype == kv_lens.dtype == pages.dtype == tiles.dtype == torch.int32
    assert q.dtype == cache_k.dtype == cache_v.dtype
    group = heads // kv_heads
    rows = min(TILE_ROWS, 1 << max(0, (64 // group).bit_length() - 1))  # as many as make at most 64 lanes
    block_d = max(16, triton.next_power_of_2(head))
    reach = window or 1 << 30
    parts = min(triton.cdiv(max_kv, SPLIT), triton.cdiv(reach, SPLIT) + 1)
    partial = parts > 1
    out = torch.empty(tokens, heads, head, dtype=q.dtype, device=q.device)
    slots = sequences * parts * heads if partial else 0
    peak, mass = (torch.empty(slots, dtype=torch.float32, device=q.device) for _ in range(2))
    total = torch.empty(slots * head, dtype=torch.float32, device=q.device)
    grid = (len(tiles) * (TILE_ROWS // rows), kv_heads, min(parts, MAX_PARALLEL))
    _attention_kernel[grid](
        q, cache_k, cache_v, out, peak, mass, total, starts, kv_lens, pages, tiles,
        scale * LOG2_E, reach, pages.stride(0), q.stride(0), parts,
        HEADS=heads, KV_HEADS=kv_heads, HEAD=head, PAGE=page,
        TILE=TILE_ROWS, ROWS=rows, SPLIT=SPLIT,
        BLOCK_D=block_d, BLOCK_M=max(16, triton.next_power_of_2(rows * group)), BLOCK_N=32 if block_d > 128 else 64,
        num_warps=4 if block_d <= 128 else 8, num_stages=2,
    )  # fmt: skip
    if partial:
        _combine_kernel[(sequences, kv_heads)](
            peak, mass, total, out, starts, kv_lens, scale * LOG2_E, reach, parts,
            HEADS=heads, KV_HEADS=kv_heads, HEAD=head, SPLIT=SPLIT,
            BLOCK_D=block_d, BLOCK_G=triton.next_power_of_2(group),
        )  # fmt: skip
    return out
