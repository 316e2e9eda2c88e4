"""The Triton kernel of attention in which one program attends to all keys of a tile of rows, split by split."""

import triton
import triton.language as tl

from worker.ops.attention.triton_shared import (
    add_sink,
    attend_block,
    begins_split,
    cache_offsets,
    cap_scores,
    empty_softmax,
    find_exponents,
    find_item,
    hide_keys,
    hides_keys,
    list_tiles,
    merge_softmax,
    split_index,
    split_start,
)
from worker.ops.triton_common import start_dependent


@triton.jit
def _attend(
    q, k_ptr, v_ptr, page_table_ptr, query_positions, last_keys, first_position, last_position, begin,
    scale, window, cap_scale,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends to the keys begin .. last_position, split by split. begin: a multiple of BLOCK_N

    q [M, D]: rows at query_positions [M] that attend to the keys up to last_keys [M]. For valid rows, both positions
        are in first_position .. last_position.
    Returns two partial softmaxes: over all splits except the last one, and over the last split.
    """
    m_i, l_i, acc = empty_softmax(BLOCK_M, BLOCK_D)
    m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
    for start in range(begin, last_position + 1, BLOCK_N):
        # This `if` must not be at the end of the loop body: there, Triton reads acc_j without waiting for its product.
        if begins_split(start, SPLIT_SIZE, SHORT_SPLITS, UNIFORM):
            m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
            m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
        m_j, l_j, acc_j = attend_block(
            q, m_j, l_j, acc_j, k_ptr, v_ptr, page_table_ptr, query_positions, last_keys, first_position, last_position,
            start, last_position + 1, scale, window, cap_scale, TOKEN, HEAD, PAGE, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    return m_i, l_i, acc, m_j, l_j, acc_j


@triton.jit
def attend_by_splits(
    q, k_ptr, v_ptr, page_table_ptr, query_positions, last_keys, first_position, last_position, begin,
    scale, window, cap_scale,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the same as `_attend`, in the same order, with a loop over the blocks of each split.

    The inner loop does not use the sums over earlier splits. So where registers do not hold two accumulators, those
    sums are in memory meanwhile, and not the numbers that every block needs.
    """
    m_i, l_i, acc = empty_softmax(BLOCK_M, BLOCK_D)
    m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
    first = split_index(begin, SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    last = split_index(last_position, SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    for index in range(first, last + 1):
        m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
        m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
        from_key = tl.maximum(begin, split_start(index, SPLIT_SIZE, SHORT_SPLITS, UNIFORM))
        to_key = tl.minimum(last_position + 1, split_start(index + 1, SPLIT_SIZE, SHORT_SPLITS, UNIFORM))
        for start in range(from_key, to_key, BLOCK_N):
            m_j, l_j, acc_j = attend_block(
                q, m_j, l_j, acc_j, k_ptr, v_ptr, page_table_ptr, query_positions, last_keys, first_position,
                last_position, start, last_position + 1, scale, window, cap_scale, TOKEN, HEAD, PAGE, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    return m_i, l_i, acc, m_j, l_j, acc_j


@triton.jit(do_not_specialize=["window", "page_table_stride", "sequences", "max_rows"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr, visible_ptr, query_start_loc_ptr, seq_lens_ptr, page_table_ptr,
    scale, window, cap_scale, page_table_stride, q_stride, sequences, max_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
    OVERLAP: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """Computes attention for sequences with more than max_rows rows.

    One program computes ROWS rows of one sequence for the query heads of one key/value head.
    visible_ptr: to how many keys each row attends, at least as many as an earlier row of its sequence; None: to
        the keys up to its own position
    OVERLAP: if true, the softmax overlaps with matrix products
    """
    start_dependent(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ends = list_tiles(query_start_loc_ptr, sequences, max_rows, ROWS, BLOCK_S)
    # the last items come first: they have the most keys
    kv_head, item = tl.program_id(0), tl.max(ends, axis=0) - 1 - tl.program_id(1)
    if item >= 0:
        sequence, tile = find_item(ends, item)
        sequence = sequence.to(tl.int64)
        begin_row = tl.load(query_start_loc_ptr + sequence)
        q_len = tl.load(query_start_loc_ptr + sequence + 1) - begin_row
        first_row = tile * ROWS
        context_len = tl.load(seq_lens_ptr + sequence) - q_len
        m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        row, head = first_row + m // GROUP, kv_head * GROUP + m % GROUP
        valid = (m < ROWS * GROUP) & (row < q_len)
        mask = valid[:, None] & (d < HEAD)[None, :]
        token = begin_row.to(tl.int64) + row
        q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * HEAD + d[None, :], mask=mask, other=0.0)
        last_row = tl.minimum(first_row + ROWS, q_len) - 1
        begin = tl.maximum(context_len + first_row - window + 1, 0) // BLOCK_N * BLOCK_N
        keys = k_ptr + kv_head * HEAD, v_ptr + kv_head * HEAD, page_table_ptr + sequence * page_table_stride
        last_keys, last_key = context_len + row, context_len + last_row
        if visible_ptr is not None:
            last_keys = tl.load(visible_ptr + token, mask=valid, other=1) - 1
            last_key = tl.load(visible_ptr + begin_row + last_row) - 1
        positions = context_len + row, last_keys, context_len + first_row, last_key, begin
        numbers = scale, window, cap_scale
        if OVERLAP:
            m_i, l_i, acc, m_j, l_j, acc_j = attend_overlapped(
                q, *keys, *positions, *numbers,
                KV_HEADS * HEAD, HEAD, PAGE, SPLIT_SIZE, SHORT_SPLITS, UNIFORM, BLOCK_M, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        elif NESTED:
            m_i, l_i, acc, m_j, l_j, acc_j = attend_by_splits(
                q, *keys, *positions, *numbers,
                KV_HEADS * HEAD, HEAD, PAGE, SPLIT_SIZE, SHORT_SPLITS, UNIFORM, BLOCK_M, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        else:
            m_i, l_i, acc, m_j, l_j, acc_j = _attend(
                q, *keys, *positions, *numbers,
                KV_HEADS * HEAD, HEAD, PAGE, SPLIT_SIZE, SHORT_SPLITS, UNIFORM, BLOCK_M, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
        if sinks_ptr is not None:
            l_i = add_sink(m_i, l_i, sinks_ptr, head, scale)
        out = (acc / tl.where(valid, l_i, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token[:, None] * HEADS + head[:, None]) * HEAD + d[None, :], out, mask=mask)


# The loop over keys of prefill attention with `softmax_overlap`: Hopper's tensor cores compute the scores of the next
# block while other units compute the softmax of the current block.
#
# An iteration adds the values of block n - 1, subtracts the maximum from the scores of block n, and starts the
# product for the scores of block n + 1. This product runs until the next iteration needs its result: meanwhile keys
# and values are loaded, weights are computed and summed, and earlier results are rescaled. The computation of a row
# is the same as with `attend_block` and `merge_softmax`, in the same order, so the row gets the same bits. The loop
# has one iteration more than there are blocks. A product beyond the last key multiplies zeros.
#
# Triton decides where to wait for a product. The product for scores stays in flight only because of three things:
# - The scores are first used after the product with values. Triton waits for the product with values at once, and
#   thereby for both products.
# - Keys are hidden and splits are merged under one `if`, which needs the result of the product with values. If the `if`
#   did not need it, Triton would move the `if`, and with it the use of the scores, to the beginning of the loop.
# - The first scores come from a product. If they were a constant, the assembler would insert a wait into the loop.
# tests/worker/ops/harness/compile_attention.py checks the compiled code. The gain in speed is not measured yet.


@triton.jit
def _load_block(
    ptr, page_table_ptr, start, begin, end, dtype: tl.constexpr,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Loads the keys or values [N, D] of the block at `start`. Positions outside of begin .. end - 1 give zeros."""
    d, positions = tl.arange(0, BLOCK_D), start + tl.arange(0, BLOCK_N)
    mask = (positions < end)[:, None] & (start >= begin)
    if HEAD < BLOCK_D:
        mask = mask & (d < HEAD)[None, :]
    # a block that has pages in the page table
    existing = tl.minimum(tl.maximum(start, begin), (end - 1) // BLOCK_N * BLOCK_N)
    offsets = cache_offsets(page_table_ptr, existing, end, TOKEN, PAGE, BLOCK_N)[:, None] + d[None, :]
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(dtype)


@triton.jit
def attend_overlapped(
    q, k_ptr, v_ptr, page_table_ptr, query_positions, last_keys, first_position, last_position, begin,
    scale, window, cap_scale,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Computes the same as `_attend`."""
    end = last_position + 1
    m_i, l_i, acc = empty_softmax(BLOCK_M, BLOCK_D)
    m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
    # The first iteration adds a block without keys, whose weights are zero.
    alpha, exponents = tl.zeros_like(l_j), tl.full((BLOCK_M, BLOCK_N), float("-inf"), dtype=tl.float32)
    k = _load_block(k_ptr, page_table_ptr, begin, begin, end, q.dtype, TOKEN, HEAD, PAGE, BLOCK_D, BLOCK_N)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    for start in range(begin, end + BLOCK_N, BLOCK_N):
        p = tl.exp2(exponents)
        l_j = tl.fma(l_j, alpha, tl.sum(p, axis=1))
        before = start - BLOCK_N
        v = _load_block(v_ptr, page_table_ptr, before, begin, end, q.dtype, TOKEN, HEAD, PAGE, BLOCK_D, BLOCK_N)
        acc_j = tl.dot(p.to(q.dtype), v, acc_j * alpha[:, None], input_precision="ieee")

        score = cap_scores(score, cap_scale)
        new_split = begins_split(start, SPLIT_SIZE, SHORT_SPLITS, UNIFORM) & (start < end)
        if new_split | hides_keys(start, first_position, last_position, window, BLOCK_N):
            if new_split:
                m_i, l_i, acc = merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale)
                m_j, l_j, acc_j = empty_softmax(BLOCK_M, BLOCK_D)
            score = hide_keys(score, start, query_positions, last_keys, window, BLOCK_N)
        m_new, m_safe, exponents = find_exponents(score, m_j, scale)
        alpha = tl.exp2((m_j - m_safe) * scale)
        m_j = m_new

        after = start + BLOCK_N
        k = _load_block(k_ptr, page_table_ptr, after, begin, end, q.dtype, TOKEN, HEAD, PAGE, BLOCK_D, BLOCK_N)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
    return m_i, l_i, acc, m_j, l_j, acc_j
