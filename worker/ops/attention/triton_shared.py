"""The partial softmax over blocks of keys that all attention kernels in Triton use: it starts empty, attends to blocks,
is merged with other partial softmaxes, and a sink is added at the end.

Names come from the FlashAttention papers: m_i is the running maximum of a row's scores, l_i the sum of its weights,
acc the weighted sum of values. The weight of a score s is 2^((s - m_i) * scale). The score s is the product of query
and key. With a soft cap, s is the tanh of (this product times `cap_scale`), and `scale` includes the cap.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_softmax(m_i, l_i, acc, m_j, l_j, acc_j, scale):
    """Merges two partial softmaxes of the same rows. m, l: [M]; acc: [M, D]. An empty softmax has m = -inf."""
    m_new = tl.maximum(m_i, m_j)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - m_safe) * scale)
    beta = tl.exp2((m_j - m_safe) * scale)
    l_i = tl.fma(l_i, alpha, l_j * beta)
    acc = tl.fma(acc, tl.zeros_like(acc) + alpha[:, None], acc_j * beta[:, None])
    return m_new, l_i, acc


@triton.jit
def empty_softmax(M: tl.constexpr, D: tl.constexpr):
    """Returns the partial softmax over no keys."""
    m_i = tl.full((M,), float("-inf"), dtype=tl.float32)
    return m_i, tl.zeros((M,), dtype=tl.float32), tl.zeros((M, D), dtype=tl.float32)


@triton.jit
def add_sink(m_i, l_i, sinks_ptr, head, scale):
    """Returns the sum l_i [M] plus the weights of sinks, whose values are zero. head [M]: the query heads of the rows

    A sink of -inf adds exactly 0. A sink far above m_i makes the sum infinite, and thus the output zero.
    """
    return l_i + tl.exp2(tl.load(sinks_ptr + head) * LOG2_E - m_i * scale)


@triton.jit
def _tanh(x):
    """Computes tanh with an absolute error below 5e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def cap_scores(score, cap_scale):
    """Applies the soft cap to scores. cap_scale: None if there is no soft cap"""
    if cap_scale is not None:
        score = _tanh(score * cap_scale)
    return score


@triton.jit
def hides_keys(start, first_position, last_position, window, BLOCK_N: tl.constexpr):
    """Returns whether some key of the block at `start` may be invisible to some row.

    first_position: the position of the first row
    last_position: the position of the last row or, if later, of the last key that a row sees
    """
    return (start + BLOCK_N > first_position + 1) | (start <= last_position - window)


@triton.jit
def hide_keys(score, start, query_positions, last_keys, window, BLOCK_N: tl.constexpr):
    """Returns the scores [M, N] of the block at `start`, with -inf for keys that a row does not see.

    last_keys [M]: the last key that each row sees
    """
    key_positions = start + tl.arange(0, BLOCK_N)
    visible = (key_positions[None, :] <= last_keys[:, None]) & (
        key_positions[None, :] > query_positions[:, None] - window
    )
    return tl.where(visible, score, float("-inf"))


@triton.jit
def find_exponents(score, m_i, scale):
    """Returns the new maximum m_new [M], m_safe [M] (m_new with 0 in place of -inf), and log2 of the weights [M, N]."""
    m_new = tl.maximum(m_i, tl.max(score, axis=1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    exponents = tl.fma(score, tl.zeros_like(score) + scale, tl.zeros_like(score) - (m_safe * scale)[:, None])
    return m_new, m_safe, exponents


@triton.jit
def cache_offsets(page_table_ptr, start, end, TOKEN: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns where positions start .. start + BLOCK_N - 1 are in the cache, as offsets in elements.

    start: a multiple of BLOCK_N; TOKEN: elements of all heads of a token; PAGE: tokens of a page
    """
    offset = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:  # one page
        page = tl.load(page_table_ptr + start // PAGE).to(tl.int64)
        return (page * PAGE + start % PAGE) * TOKEN + offset * TOKEN
    if BLOCK_N % PAGE == 0 and BLOCK_N <= 4 * PAGE:  # a few whole pages
        page = tl.zeros((BLOCK_N,), dtype=tl.int64)
        for index in tl.static_range(BLOCK_N // PAGE):
            page_id = tl.load(page_table_ptr + start // PAGE + index, mask=start + index * PAGE < end, other=0)
            page = tl.where(offset // PAGE == index, page_id.to(tl.int64), page)
        return page * (PAGE * TOKEN) + offset % PAGE * TOKEN
    key_positions = start + offset
    page = tl.load(page_table_ptr + key_positions // PAGE, mask=key_positions < end, other=0).to(tl.int64)
    return (page * PAGE + key_positions % PAGE) * TOKEN


@triton.jit
def attend_block(
    q, m_i, l_i, acc, k_ptr, v_ptr, page_table_ptr, query_positions, last_keys, first_position, last_position,
    start, end, scale, window, cap_scale,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the keys start .. start + BLOCK_N - 1 that are below `end` to the partial softmax of q.

    q [M, D]: rows at query_positions [M] that see the keys up to last_keys [M]. For valid rows, query_positions and
        last_keys are in first_position .. last_position, and last_position < end.
    cap_scale: None if there is no soft cap
    """
    d, key_positions = tl.arange(0, BLOCK_D), start + tl.arange(0, BLOCK_N)
    mask = key_positions < end
    load_mask = mask[:, None]
    if HEAD < BLOCK_D:
        load_mask = load_mask & (d < HEAD)[None, :]
    offsets = cache_offsets(page_table_ptr, start, end, TOKEN, PAGE, BLOCK_N)[:, None] + d[None, :]
    k = tl.load(k_ptr + offsets, mask=load_mask, other=0.0).to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
    score = cap_scores(score, cap_scale)
    if hides_keys(start, first_position, last_position, window, BLOCK_N):
        score = hide_keys(score, start, query_positions, last_keys, window, BLOCK_N)
    m_new, m_safe, exponents = find_exponents(score, m_i, scale)
    p = tl.exp2(exponents)
    alpha = tl.exp2((m_i - m_safe) * scale)
    l_i = tl.fma(l_i, alpha, tl.sum(p, axis=1))
    v = tl.load(v_ptr + offsets, mask=load_mask, other=0.0).to(q.dtype)
    acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m_new, l_i, acc
