"""The loop over keys of prefill attention with `softmax_overlap`: Hopper's tensor cores compute the scores of the next
block while other units compute the softmax of the current block.

An iteration adds the values of block n - 1, subtracts the maximum from the scores of block n, and starts the product
for the scores of block n + 1. This product runs until the next iteration needs its result: meanwhile keys and values
are loaded, weights are computed and summed, and earlier results are rescaled. The computation of a row is the same as
with `attend_block` and `merge_softmax`, in the same order, so the row gets the same bits. The loop has one iteration
more than there are blocks. A product beyond the last key multiplies zeros.

Triton decides where to wait for a product. The product for scores stays in flight only because of three things:
- The scores are first used after the product with values. Triton waits for the product with values at once, and thereby
  for both products.
- Keys are hidden and splits are merged under one `if`, which needs the result of the product with values. If the `if`
  did not need it, Triton would move the `if`, and with it the use of the scores, to the beginning of the loop.
- The first scores come from a product. If they were a constant, the assembler would insert a wait into the loop.
tests/worker/kernels/harness/compile_attention.py checks the compiled code. The gain in speed is not measured yet.
"""

import triton
import triton.language as tl

from worker.kernels.gpu.attention.key_splits import begins_split
from worker.kernels.gpu.attention.online_softmax import (
    cache_offsets,
    cap_scores,
    empty_softmax,
    find_exponents,
    hide_keys,
    hides_keys,
    merge_softmax,
)


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
    """Computes the same as `_attend` in prefill_attention.py."""
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
