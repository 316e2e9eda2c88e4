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
    last_position: the position of the last row or, if later, of the last key that a row attends to
    """
    return (start + BLOCK_N > first_position + 1) | (start <= last_position - window)


@triton.jit
def hide_keys(score, start, query_positions, last_keys, window, BLOCK_N: tl.constexpr):
    """Returns the scores [M, N] of the block at `start`, with -inf for keys that a row does not attend to.

    last_keys [M]: the last key that each row attends to
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

    q [M, D]: rows at query_positions [M] that attend to the keys up to last_keys [M]. For valid rows, both positions
        are in first_position .. last_position, and last_position < end.
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


# Cuts the keys of a sequence into splits, which attention computes separately.
#
# The positions of the cuts do not depend on the batch.
#
# With UNIFORM (sliding windows, which cover few keys), all splits have SPLIT_SIZE positions. Otherwise, the first
# SHORT_SPLITS splits have SPLIT_SIZE positions, the next 3/4 SHORT_SPLITS splits are four times as long, and all
# later splits are 16 times as long. Long sequences keep a GPU busy even with fewer splits, and each split costs
# memory for a partial result. SPLIT_SIZE is a power of two, SHORT_SPLITS a multiple of four.


@triton.jit
def split_index(position, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns the index of the split that contains a position."""
    index = position // SPLIT_SIZE
    if not UNIFORM:
        later = tl.where(
            index < 4 * SHORT_SPLITS, index // 4 + SHORT_SPLITS * 3 // 4, index // 16 + SHORT_SPLITS * 3 // 2
        )
        index = tl.where(index < SHORT_SPLITS, index, later)
    return index


@triton.jit
def split_start(index, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns the first position of a split."""
    start = index
    if not UNIFORM:
        later = tl.where(
            index < SHORT_SPLITS * 7 // 4, 4 * (index - SHORT_SPLITS * 3 // 4), 16 * (index - SHORT_SPLITS * 3 // 2)
        )
        start = tl.where(index < SHORT_SPLITS, index, later)
    return start * SPLIT_SIZE


@triton.jit
def kind_start(kind, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns the index of the first split of a kind. For kind -1, it is larger than any index.

    The splits of kind 2 come first, then the longer splits of kind 1, and last the longest splits, of kind 0. With
    UNIFORM, there is only kind 0. The splits of kind k end where kind k - 1 starts. A kind without splits starts at 0.
    """
    start = tl.where(kind < 0, 1 << 30, 0)
    if not UNIFORM:
        start = tl.where(kind == 0, SHORT_SPLITS * 7 // 4, tl.where(kind == 1, SHORT_SPLITS, start))
    return start


@triton.jit
def begins_split(position, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr):
    """Returns whether a split begins at `position`."""
    size = SPLIT_SIZE
    if not UNIFORM:
        size = tl.where(
            position < SHORT_SPLITS * SPLIT_SIZE,
            SPLIT_SIZE,
            tl.where(position < 4 * SHORT_SPLITS * SPLIT_SIZE, 4 * SPLIT_SIZE, 16 * SPLIT_SIZE),
        )
    return position % size == 0


def count_splits(max_kv_len: int, window: int, split_size: int, short_splits: int) -> int:
    """Returns the most splits that a row with up to `max_kv_len` keys can attend to. window: 0 means no window"""
    index = (max_kv_len - 1) // split_size
    if window:
        return min(index, triton.cdiv(window, split_size)) + 1
    later = index // 4 + short_splits * 3 // 4 if index < 4 * short_splits else index // 16 + short_splits * 3 // 2
    return (index if index < short_splits else later) + 1


# Lists the work of attention's programs on the device, because the host knows only upper bounds of lengths.
#
# A fixed number of programs walks a list of work items that is stored nowhere. Each program computes from the lengths
# how many items every sequence has, and adds these numbers up: `ends` has the sum up to each sequence. Item i belongs
# to the first entry of `ends` that is greater than i. A sequence without rows (padding) has no items, so a bound far
# above the real lengths causes no items either.
#
# If a sequence has up to `max_rows` rows, its keys are split: an item is one split of its keys for one tile of its
# rows. If a sequence has more rows, an item is one tile of its rows with all their keys.

# a kernel is compiled for up to FEW sequences, for up to MANY, and for up to each greater power of two
FEW, MANY = 32, 256


def sequence_block(sequences: int) -> int:
    """Returns for how many sequences, including padding, a program lists items."""
    return FEW if sequences <= FEW else max(MANY, triton.next_power_of_2(sequences))


@triton.jit
def find_item(ends, item):
    """Returns the entry of an item, and the item's index within the entry."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), axis=0), item - tl.max(tl.where(before, ends, 0), axis=0)


@triton.jit
def count_rows(query_start_loc_ptr, sequences, sequence):
    """Returns how many rows each sequence has; 0 if the index `sequence` is not below `sequences`."""
    exists = sequence < sequences
    begin = tl.load(query_start_loc_ptr + sequence, mask=exists, other=0)
    return tl.load(query_start_loc_ptr + sequence + 1, mask=exists, other=0) - begin


@triton.jit
def list_tiles(query_start_loc_ptr, sequences, max_rows, ROWS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Returns the ends [BLOCK_S] of a list of tiles: tiles of ROWS rows, of all sequences with over max_rows rows."""
    q_len = count_rows(query_start_loc_ptr, sequences, tl.arange(0, BLOCK_S))
    return tl.cumsum(tl.where(q_len > max_rows, tl.cdiv(q_len, ROWS), 0), axis=0)


@triton.jit
def list_split_rows(query_start_loc_ptr, sequences, max_rows, BLOCK_S: tl.constexpr):
    """Returns the ends [BLOCK_S] of a list of rows: all rows of sequences with at most max_rows rows."""
    q_len = count_rows(query_start_loc_ptr, sequences, tl.arange(0, BLOCK_S))
    return tl.cumsum(tl.where(q_len <= max_rows, q_len, 0), axis=0)


@triton.jit
def list_splits(
    query_start_loc_ptr, seq_lens_ptr, sequences, max_rows, window,
    ROWS: tl.constexpr, SPLIT_SIZE: tl.constexpr, SHORT_SPLITS: tl.constexpr, UNIFORM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Returns the ends [KINDS * BLOCK_S] of a list of splits: for each tile of ROWS rows of a sequence with at most
    max_rows rows, the splits of the sequence's keys.

    Entry k * BLOCK_S + s has the splits of kind k of sequence s; kind 0 has the longest splits. So the longest splits
    of all sequences are first in the list, and if a program gets one item less than others, it misses only a short
    split.
    """
    # three kinds, and an empty one, because KINDS * BLOCK_S must be a power of two
    KINDS: tl.constexpr = 1 if UNIFORM else 4
    entry = tl.arange(0, KINDS * BLOCK_S)
    sequence = entry % BLOCK_S
    q_len = count_rows(query_start_loc_ptr, sequences, sequence)
    seq_len = tl.load(seq_lens_ptr + sequence, mask=sequence < sequences, other=0)
    first = split_index(tl.maximum(seq_len - q_len + 1 - window, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    last = split_index(tl.maximum(seq_len - 1, 0), SPLIT_SIZE, SHORT_SPLITS, UNIFORM)
    begin = tl.maximum(first, kind_start(entry // BLOCK_S, SHORT_SPLITS, UNIFORM))
    end = tl.minimum(last + 1, kind_start(entry // BLOCK_S - 1, SHORT_SPLITS, UNIFORM))
    splits = tl.where(q_len <= max_rows, tl.maximum(end - begin, 0), 0)
    return tl.cumsum(splits * tl.cdiv(q_len, ROWS), axis=0)
