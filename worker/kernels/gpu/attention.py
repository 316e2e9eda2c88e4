"""Triton kernels for attention: one for decodes, one that merges their splits, one for sequences with several rows.

A row is one query token. So a sequence with one row is a decode (or a prompt or chunk of one token).

The bits of a row never depend on the batch, the chunking, padding or the division of work. The keys of a row are cut at
absolute positions: into splits (`split_start`), and splits into blocks of BLOCK_N. `attend_block` computes each split
from an empty state (online softmax over its blocks, in order), and `merge_softmax` merges the splits, in order. A
block or split without visible keys changes nothing, to the bit: it multiplies by one and adds zero. For a sequence with
one row, different programs compute the splits and store their results, and `_combine_kernel` merges them. For other
sequences, one program computes and merges all splits of a row, with the same functions in the same order. A sink enters
the sum of a row last, after all splits.

The two kernels that attend differ in the height of their tile, but not in the computation of a row: its matrix products
come from the same instruction (64 rows for a group of four warps, as many columns, 16 deep), over the same columns in
the same order, and its maximum and sum from the same four threads. Where four warps cannot hold 64 rows of two
accumulators (head sizes above 128), and without tensor cores (float32), both kernels use the same tile.

online_softmax.py defines m_i, l_i, acc, `scale` and `cap_scale`. Without sinks or a soft cap, sinks_ptr or cap_scale is
None, and nothing is compiled for them.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.gpu.dependent_launch import pdl_options, start_dependent
from worker.kernels.gpu.key_splits import begins_split, count_splits, split_index, split_start
from worker.kernels.gpu.online_softmax import LOG2_E, add_sink, attend_block, empty_softmax, merge_softmax
from worker.kernels.gpu.options import NO_OPTIONS, GpuOptions
from worker.kernels.gpu.tiles import shared_memory

SPLIT_SIZE = 256  # positions of the shortest splits (see key_splits.py); a multiple of every block_n
SHORT_SPLITS = 32  # later splits are longer (key_splits.py), which bounds the partial results in memory
MAX_DECODE_PROGRAMS = 16384  # the largest number of programs in a launch for decodes
MIN_WORKERS = 8  # the fewest programs for a sequence and key/value head that has as many splits
SPLITS_AT_ONCE = 8  # partial results that _combine_kernel reads at once
FIVE_STAGES_FROM = 160 << 10  # bytes of shared memory; five stages take up to 132 KiB, three up to 99
NO_FP_FUSION = {"enable_fp_fusion": False}  # every kernel rounds multiplications and additions as written


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes of the prefill and decode kernels, with their warps and pipeline stages.

    block_n: keys of a block. prefill_m, decode_m: rows of a tile, which are query rows times heads of a group.
    """

    block_n: int
    prefill_m: int
    prefill_warps: int
    decode_m: int
    decode_warps: int
    stages: int


def choose_tiles(head: int, group: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Returns the tiles, chosen for an H200.

    There are five pipeline stages because keys and values are loaded two blocks ahead, and their page ids two blocks
    before that. A GPU with less shared memory than FIVE_STAGES_FROM loads them one block ahead.

    shared_memory: bytes that a program may have. It decides the number of stages only, which changes no bits.
    """
    tiles = _large_tiles(head, group, dtype)
    return tiles if shared_memory >= FIVE_STAGES_FROM else replace(tiles, stages=min(tiles.stages, 3))


def _large_tiles(head: int, group: int, dtype: torch.dtype) -> Tiles:
    group_rows = triton.next_power_of_2(group)
    if dtype == torch.float32:
        return Tiles(32, max(16, group_rows), 4, max(16, group_rows), 4, 1)
    if head > 256:  # more rows, or more stages, need more registers and shared memory than there are
        return Tiles(32, max(32, group_rows), 8, max(16, group_rows), 8, 2)
    if head > 128:
        return Tiles(32, max(64, group_rows), 8, max(64, group_rows), 8, 5)
    return Tiles(
        128 if head <= 64 else 64, max(128, group_rows), 8, max(64, group_rows), 4 if group_rows <= 64 else 8, 5
    )


@triton.jit(do_not_specialize=["window", "page_table_stride", "max_splits"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, l_ptr, acc_ptr, query_start_loc_ptr, seq_lens_ptr, page_table_ptr,
    scale, window, cap_scale, page_table_stride, q_stride, max_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes splits of sequences with one row and stores their partial results.

    One program computes splits of one sequence for the query heads of one key/value head. When a sequence has more
    splits than programs, program i computes splits i, i + programs and so on.
    """
    start_dependent(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, worker, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
    q_len = tl.load(query_start_loc_ptr + sequence + 1) - row
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_key = tl.maximum(seq_len - window, 0)
    first = split_index(first_key, SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    count = split_index(seq_len - 1, SPLIT_SIZE, SHORT_SPLITS, UNIFORM) + 1 - first
    if (q_len == 1) & (worker < count):
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        head, valid = kv_head * GROUP + m, m < GROUP
        mask = valid[:, None] & (d < HEAD)[None, :]
        q = tl.load(q_ptr + row * q_stride + head[:, None] * HEAD + d[None, :], mask=mask, other=0.0)
        query_positions = tl.full((BLOCK_M,), 0, dtype=tl.int32) + (seq_len - 1)
        for split in range(worker, count, tl.num_programs(1)):
            begin = tl.maximum(
                split_start(first + split, SPLIT_SIZE, SHORT_SPLITS, UNIFORM), first_key // BLOCK_N * BLOCK_N
            )
            end = tl.minimum(split_start(first + split + 1, SPLIT_SIZE, SHORT_SPLITS, UNIFORM), seq_len)
            m_i, l_i, acc = empty_softmax(BLOCK_M, BLOCK_D)
            for start in range(begin, end, BLOCK_N):
                m_i, l_i, acc = attend_block(
                    q, m_i, l_i, acc, k_ptr + kv_head * HEAD, v_ptr + kv_head * HEAD,
                    page_table_ptr + sequence * page_table_stride, query_positions, seq_len - 1, seq_len - 1,
                    start, end, scale, window, cap_scale, KV_HEADS * HEAD, HEAD, PAGE, BLOCK_D, BLOCK_N,
                )  # fmt: skip
            entry = (sequence * max_splits + split) * HEADS + head
            tl.store(m_ptr + entry, m_i, mask=valid)
            tl.store(l_ptr + entry, l_i, mask=valid)
            tl.store(acc_ptr + entry[:, None] * HEAD + d[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["window", "max_splits"])
def _combine_kernel(
    m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, query_start_loc_ptr, seq_lens_ptr, scale, window, max_splits,
    HEADS: tl.constexpr, HEAD: tl.constexpr, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr,
    UNIFORM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of the splits of each sequence with one row; skips other sequences.

    One program merges one query head of one sequence, and loads SPLITS_AT_ONCE splits at a time.
    """
    start_dependent(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
    if tl.load(query_start_loc_ptr + sequence + 1) - row == 1:
        seq_len = tl.load(seq_lens_ptr + sequence)
        d, zero = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, 1)
        first = split_index(tl.maximum(seq_len - window, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
        count = split_index(seq_len - 1, SPLIT_SIZE, SHORT_SPLITS, UNIFORM) + 1 - first
        m_i, l_i, acc = empty_softmax(1, BLOCK_D)
        for begin in range(0, count, SPLITS_AT_ONCE):
            for offset in tl.static_range(SPLITS_AT_ONCE):
                exists = begin + offset < count
                entry = (sequence * max_splits + begin + offset) * HEADS + head + zero
                m_j = tl.load(m_ptr + entry, mask=exists & (zero == 0), other=float("-inf"))
                l_j = tl.load(l_ptr + entry, mask=exists & (zero == 0), other=0.0)
                acc_j = tl.load(acc_ptr + entry[:, None] * HEAD + d, mask=exists & (d < HEAD), other=0.0)
                m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
        if sinks_ptr is not None:
            l_i = add_sink(m_i, l_i, sinks_ptr, head + zero, scale)
        out = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row * HEADS + head) * HEAD + d, out, mask=d < HEAD)


@triton.jit
def _find_sequence(query_start_loc_ptr, sequences, tile, ROWS: tl.constexpr):
    """Returns the sequence of a tile. The first tile of sequence s is query_start_loc[s] // ROWS + s.

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
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, query_start_loc_ptr, seq_lens_ptr, page_table_ptr,
    scale, window, cap_scale, page_table_stride, q_stride, sequences,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attends for sequences with several rows.

    One program computes ROWS rows of one sequence for the query heads of one key/value head.
    """
    start_dependent(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # first the rows with most keys
    sequence = _find_sequence(query_start_loc_ptr, sequences, tile, ROWS).to(tl.int64)
    begin_row = tl.load(query_start_loc_ptr + sequence)
    q_len = tl.load(query_start_loc_ptr + sequence + 1) - begin_row
    first_row = (tile - begin_row // ROWS - sequence.to(tl.int32)) * ROWS
    if (q_len > 1) & (first_row < q_len):
        context_len = tl.load(seq_lens_ptr + sequence) - q_len
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        row, head = first_row + m // GROUP, kv_head * GROUP + m % GROUP
        valid = (m < ROWS * GROUP) & (row < q_len)
        mask = valid[:, None] & (d < HEAD)[None, :]
        token = begin_row.to(tl.int64) + row
        q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * HEAD + d[None, :], mask=mask, other=0.0)
        last_row = tl.minimum(first_row + ROWS, q_len) - 1
        begin = tl.maximum(context_len + first_row - window + 1, 0) // BLOCK_N * BLOCK_N
        m_i, l_i, acc = empty_softmax(BLOCK_M, BLOCK_D)
        m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
        for start in range(begin, context_len + last_row + 1, BLOCK_N):
            # This must not be at the end of the loop body: there Triton reads acc_j without waiting for its product.
            if begins_split(start, SPLIT_SIZE, SHORT_SPLITS, UNIFORM):
                m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
                m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
            m_j, l_j, acc_j = attend_block(
                q, m_j, l_j, acc_j, k_ptr + kv_head * HEAD, v_ptr + kv_head * HEAD,
                page_table_ptr + sequence * page_table_stride, context_len + row, context_len + first_row,
                context_len + last_row, start, context_len + last_row + 1, scale, window, cap_scale,
                KV_HEADS * HEAD, HEAD, PAGE, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
        if sinks_ptr is not None:
            l_i = add_sink(m_i, l_i, sinks_ptr, head, scale)
        out = (acc / tl.where(valid, l_i, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token[:, None] * HEADS + head[:, None]) * HEAD + d[None, :], out, mask=mask)


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
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    options: GpuOptions = NO_OPTIONS,
) -> Tensor:
    """Computes the same as `attention_torch`. max_kv_len: at least every seq_len.

    Reads no tensor on the host: shapes and max_kv_len decide what is launched, but never affect the bits.
    """
    tokens, heads, head = q.shape
    page, kv_heads = cache_k.shape[1:3]
    sequences = len(seq_lens)
    assert q.stride()[1:] == (head, 1) and 0 < sequences <= tokens and scale > 0 and softcap >= 0
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    _check_caches(q, cache_k, cache_v)
    _check_layout(query_start_loc, seq_lens, page_table)
    out = torch.empty(tokens, heads, head, dtype=q.dtype, device=q.device)
    common: dict[str, int | bool] = NO_FP_FUSION | pdl_options(options) | {
        "HEADS": heads, "HEAD": head, "SPLIT_SIZE": SPLIT_SIZE, "SHORT_SPLITS": SHORT_SPLITS, "UNIFORM": window > 0,
        "BLOCK_D": max(16, triton.next_power_of_2(head)),
    }  # fmt: skip
    tiles = choose_tiles(head, heads // kv_heads, q.dtype, shared_memory(q.device))
    cache = {"KV_HEADS": kv_heads, "PAGE": page, "BLOCK_N": tiles.block_n}
    scale_log2, cap_scale = (softcap or scale) * LOG2_E.value, scale / softcap if softcap else None
    window_size = window or 1 << 30
    if tokens > sequences:  # some sequence has several rows
        rows = tiles.prefill_m // (heads // kv_heads)
        _prefill_kernel[(kv_heads, tokens // rows + sequences)](
            q, cache_k, cache_v, out, sinks, query_start_loc, seq_lens, page_table,
            scale_log2, window_size, cap_scale, page_table.stride(0), q.stride(0), sequences,
            ROWS=rows, BLOCK_M=tiles.prefill_m, num_warps=tiles.prefill_warps, num_stages=tiles.stages,
            **common, **cache,
        )  # fmt: skip
    if sequences > 1 or tokens == 1:  # some sequence may have a single row
        max_splits = count_splits(max_kv_len, window, SPLIT_SIZE, SHORT_SPLITS)
        m_i, l_i = (torch.empty(sequences * max_splits * heads, dtype=torch.float32, device=q.device) for _ in "ml")
        acc = torch.empty(sequences * max_splits * heads * head, dtype=torch.float32, device=q.device)
        workers = min(max_splits, max(MIN_WORKERS, MAX_DECODE_PROGRAMS // (sequences * kv_heads)))
        _decode_kernel[(kv_heads, workers, sequences)](
            q, cache_k, cache_v, m_i, l_i, acc, query_start_loc, seq_lens, page_table,
            scale_log2, window_size, cap_scale, page_table.stride(0), q.stride(0), max_splits,
            BLOCK_M=tiles.decode_m, num_warps=tiles.decode_warps, num_stages=tiles.stages,
            **common, **cache,
        )  # fmt: skip
        _combine_kernel[(heads, sequences)](
            m_i, l_i, acc, out, sinks, query_start_loc, seq_lens, scale_log2, window_size, max_splits,
            SPLITS_AT_ONCE=SPLITS_AT_ONCE, num_warps=1, **common,
        )  # fmt: skip
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
