"""Triton kernels of attention in which different programs compute the splits of a row's keys.

`_split_kernel` computes partial results. `_combine_kernel`, or the last program that finishes a tile, merges them in
the order of the splits. A tile is up to ROWS rows of one sequence, for the query heads of one key/value head.

A partial result (m_i, l_i, acc of triton_shared.py) is stored at the index ((r * max_splits) + s) * HEADS + head.
Here s is the index of the split among the splits that the row attends to, and r is the row's place in memory:
place_of(...) of its sequence, plus the index of the row in the sequence. max_splits: the most splits of any row.
"""

import triton
import triton.language as tl

from worker.ops.attention.triton_shared import (
    add_sink,
    attend_block,
    empty_softmax,
    find_item,
    kind_start,
    list_split_rows,
    list_splits,
    merge_softmax,
    split_index,
    split_start,
)
from worker.ops.triton_common import start_dependent


@triton.jit
def place_of(begin_row, sequence, max_rows):
    """Returns the place in memory of the first row of a sequence whose keys are split, which has at most max_rows rows.

    min(tokens, sequences * max_rows) places suffice: from one sequence to the next, begin_row and sequence * max_rows
    grow by at least the number of the sequence's rows, and so does their minimum.
    """
    return tl.minimum(begin_row, sequence * max_rows)


@triton.jit
def _store_partial(
    m_ptr, l_ptr, acc_ptr, m_i, l_i, acc, split, position, place, head, valid, window, max_splits,
    HEADS: tl.constexpr, HEAD: tl.constexpr, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr,
    UNIFORM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Stores a split's partial results for those valid rows of a tile that attend to the split."""
    d = tl.arange(0, BLOCK_D)
    seen = split - split_index(tl.maximum(position + 1 - window, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    sees = valid & (seen >= 0) & (split <= split_index(position, SPLIT_SIZE, SHORT_SPLITS, UNIFORM))
    entry = (place * max_splits + seen) * HEADS + head
    tl.store(m_ptr + entry, m_i, mask=sees)
    tl.store(l_ptr + entry, l_i, mask=sees)
    tl.store(acc_ptr + entry[:, None] * HEAD + d[None, :], acc, mask=sees[:, None] & (d < HEAD)[None, :])


@triton.jit
def _merge_splits(
    m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, first_entry, count, head, valid, scale,
    HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of `count` splits of one row, for the query heads `head` [M] that are `valid`.

    first_entry: index of the partial result of the row's first split, for head 0
    out_ptr: the row's output
    SPLITS_AT_ONCE: how many partial results are loaded at once, so that the program waits for memory less often
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    m_i, l_i, acc = empty_softmax(head.shape[0], BLOCK_D)
    for begin in range(0, count, SPLITS_AT_ONCE):
        for offset in tl.static_range(SPLITS_AT_ONCE):
            exists = valid & (begin + offset < count)
            entry = first_entry + (begin + offset) * HEADS + head
            m_j = tl.load(m_ptr + entry, mask=exists, other=float("-inf"))
            l_j = tl.load(l_ptr + entry, mask=exists, other=0.0)
            acc_j = tl.load(acc_ptr + entry[:, None] * HEAD + d, mask=exists[:, None] & (d < HEAD), other=0.0)
            m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
    if sinks_ptr is not None:
        l_i = tl.where(valid, add_sink(m_i, l_i, sinks_ptr, tl.where(valid, head, 0), scale), 1.0)
    out = (acc / tl.where(valid, l_i, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head[:, None] * HEAD + d, out, mask=valid[:, None] & (d < HEAD))


@triton.jit
def _merge_row(
    m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, token, position, place, head, valid, scale, window, max_splits,
    HEADS: tl.constexpr, HEAD: tl.constexpr, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr,
    UNIFORM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges the splits of a row. token: the row's index in the batch; position: its position in the sequence"""
    first = split_index(tl.maximum(position + 1 - window, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    count = split_index(position, SPLIT_SIZE, SHORT_SPLITS, UNIFORM) + 1 - first
    _merge_splits(
        m_ptr, l_ptr, acc_ptr, out_ptr + token * (HEADS * HEAD), sinks_ptr, place * max_splits * HEADS, count,
        head, valid, scale, HEADS, HEAD, BLOCK_D, SPLITS_AT_ONCE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "page_table_stride", "sequences", "max_rows", "max_splits"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, arrivals_ptr,
    query_start_loc_ptr, seq_lens_ptr, page_table_ptr,
    scale, window, cap_scale, page_table_stride, q_stride, sequences, max_rows, max_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the splits of sequences with at most max_rows rows, and stores their partial results.

    The programs of a key/value head take the items of the list in turns. In every second round, their order is
    reversed, so that a program with the longest item of one round gets the shortest item of the next round.
    arrivals_ptr: if given, the last program to finish a split of a tile merges the tile's splits (see _merge_tile)
    """
    start_dependent(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, worker, workers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    ends = list_splits(
        query_start_loc_ptr, seq_lens_ptr, sequences, max_rows, window, ROWS, SPLIT_SIZE, SHORT_SPLITS, UNIFORM, BLOCK_S
    )
    items = tl.max(ends, axis=0)
    for turn in range(0, items, workers):
        item = turn + tl.where(turn // workers % 2 == 0, worker, workers - 1 - worker)
        if item < items:
            entry, index = find_item(ends, item)
            sequence = (entry % BLOCK_S).to(tl.int64)
            begin_row = tl.load(query_start_loc_ptr + sequence)
            q_len = tl.load(query_start_loc_ptr + sequence + 1) - begin_row
            context_len = tl.load(seq_lens_ptr + sequence) - q_len
            tiles = tl.cdiv(q_len, ROWS)
            first_row = index % tiles * ROWS
            first_split = split_index(tl.maximum(context_len + 1 - window, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
            split = tl.maximum(first_split, kind_start(entry // BLOCK_S, SHORT_SPLITS, UNIFORM)) + index // tiles

            m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            # In terms of m alone, these values would not depend on the item, and the compiler would keep them in
            # registers throughout the loop.
            at = first_row * GROUP + m
            row, head, end_row = at // GROUP, kv_head * GROUP + at % GROUP, tl.minimum(first_row + ROWS, q_len)
            valid, last_position = at < end_row * GROUP, context_len + end_row - 1
            first_key = tl.maximum(context_len + first_row + 1 - window, 0) // BLOCK_N * BLOCK_N
            begin = tl.maximum(split_start(split, SPLIT_SIZE, SHORT_SPLITS, UNIFORM), first_key)
            end = tl.minimum(split_start(split + 1, SPLIT_SIZE, SHORT_SPLITS, UNIFORM), last_position + 1)
            if begin < end:  # Some row of the tile attends to the split.
                token = begin_row.to(tl.int64) + row
                mask = valid[:, None] & (d < HEAD)[None, :]
                q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * HEAD + d[None, :], mask=mask, other=0.0)
                m_i, l_i, acc = empty_softmax(BLOCK_M, BLOCK_D)
                for start in range(begin, end, BLOCK_N):
                    m_i, l_i, acc = attend_block(
                        q, m_i, l_i, acc, k_ptr + kv_head * HEAD, v_ptr + kv_head * HEAD,
                        page_table_ptr + sequence * page_table_stride, context_len + row, context_len + row,
                        context_len + first_row, last_position, start, end, scale, window, cap_scale,
                        KV_HEADS * HEAD, HEAD, PAGE, BLOCK_D, BLOCK_N,
                    )  # fmt: skip
                place = place_of(begin_row, sequence, max_rows)
                _store_partial(
                    m_ptr, l_ptr, acc_ptr, m_i, l_i, acc, split, context_len + row, place + row, head, valid, window,
                    max_splits, HEADS, HEAD, SPLIT_SIZE, SHORT_SPLITS, UNIFORM, BLOCK_D,
                )  # fmt: skip
                if arrivals_ptr is not None:
                    _merge_tile(
                        m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, arrivals_ptr,
                        begin_row.to(tl.int64), place, context_len, first_row, last_position, kv_head,
                        scale, window, max_splits, HEADS, KV_HEADS, HEAD, SPLIT_SIZE, SHORT_SPLITS, UNIFORM,
                        BLOCK_D, SPLITS_AT_ONCE,
                    )  # fmt: skip


@triton.jit
def _merge_tile(
    m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, arrivals_ptr,
    begin_row, place, context_len, first_row, last_position, kv_head, scale, window, max_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Counts a finished split of a tile. If all splits of the tile are now finished, merges the splits of the tile's
    rows.

    The barrier orders the stores of all threads before the atomic addition. The addition releases these stores to the
    programs that add to the counter later. By its own addition, the last program acquires the results of all others.
    The last program may set the counter back to zero, because no other program adds to the counter in this launch.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    first_key = tl.maximum(context_len + first_row + 1 - window, 0)
    splits = split_index(last_position, SPLIT_SIZE, SHORT_SPLITS, UNIFORM) + 1
    splits -= split_index(first_key, SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    counter = arrivals_ptr + (place + first_row) * KV_HEADS + kv_head
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
        head = tl.arange(0, triton.next_power_of_2(GROUP))
        for row in range(first_row, last_position - context_len + 1):
            _merge_row(
                m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, begin_row + row, context_len + row, place + row,
                kv_head * GROUP + head, head < GROUP, scale, window, max_splits,
                HEADS, HEAD, SPLIT_SIZE, SHORT_SPLITS, UNIFORM, BLOCK_D, SPLITS_AT_ONCE,
            )  # fmt: skip
        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["window", "sequences", "max_rows", "max_splits"])
def _combine_kernel(
    m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, query_start_loc_ptr, seq_lens_ptr,
    scale, window, sequences, max_rows, max_splits,
    HEADS: tl.constexpr, HEAD: tl.constexpr, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr,
    UNIFORM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merges the splits of all rows of sequences with at most max_rows rows.

    One program merges some of these rows, for one query head.
    """
    start_dependent(PDL)
    one = tl.arange(0, 1)
    ends = list_split_rows(query_start_loc_ptr, sequences, max_rows, BLOCK_S)
    for item in range(tl.program_id(1), tl.max(ends, axis=0), tl.num_programs(1)):
        sequence, row = find_item(ends, item)
        begin_row = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
        q_len = tl.load(query_start_loc_ptr + sequence + 1) - begin_row
        position = tl.load(seq_lens_ptr + sequence) - q_len + row
        place = place_of(begin_row, sequence.to(tl.int64), max_rows) + row
        _merge_row(
            m_ptr, l_ptr, acc_ptr, out_ptr, sinks_ptr, begin_row + row, position, place,
            tl.program_id(0) + one, one == 0, scale, window, max_splits,
            HEADS, HEAD, SPLIT_SIZE, SHORT_SPLITS, UNIFORM, BLOCK_D, SPLITS_AT_ONCE,
        )  # fmt: skip
