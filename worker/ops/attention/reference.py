"""Causal attention of packed tokens over the paged cache. Prefill, chunk and decode are the same computation.

Row i of a sequence with q_len rows is at position p = seq_len - q_len + i. It attends to the positions
max(0, p - window + 1) .. p, without a window to 0 .. p. `bidirectional_end` may extend these positions beyond p. Their
keys and values are in the pages of the sequence's page table. Query heads come in groups that share a key/value head.
Keys and values in codes are converted to q's dtype.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.paged_kv import dequantize_rows, has_scales

GATHER_ELEMENTS = 1 << 25  # the most elements of keys that are gathered at once
MASK_ELEMENTS = 1 << 26  # the most mask entries that are in memory at once


def attention_torch(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, query_start_loc: Tensor, seq_lens: Tensor, page_table: Tensor,
    max_kv_len: int, *, scale: float, window: int, sinks: Tensor | None = None, softcap: float = 0.0,
    next_weights: Sequence[Tensor] = (), bidirectional_end: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns softmax(q k^T * scale) v over the cache for every row. The rows' own K/V must be written before.

    q [T, Hq, D]: rows may be strided; Hq is a multiple of Hk
    query_start_loc [S + 1], seq_lens [S], page_table [S, P]: int32
    cache_k, cache_v: [pages, page_size, Hk, D] of q's dtype or float8_e4m3fn, or with codes and their scale in the last
        dimension (worker/ops/paged_kv.py)
    window: a row at position p attends to no key before p - window + 1; 0: to all keys up to its own
    softcap: if c is not 0, scaled scores become c * tanh(scores / c); sinks are not capped
    sinks [Hq] float32: for each query head the unscaled logit of an additional key whose value is zero
    bidirectional_end [T] int32: to how many keys of its sequence each row attends: at least those up to its
        own, at least as many as the row before it, and at most seq_lens.
    max_kv_len: at least the largest of seq_lens. next_weights: the next products' weights. Only GPUs use these two.

    Returns [T, Hq, D] in q's dtype. Decodes (sequences with one row) and other sequences are computed in separate
    padded batches, so that decodes are not padded to the length of chunks.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    query_start_loc, seq_lens, page_table = query_start_loc.long(), seq_lens.long(), page_table.long()
    starts, q_lens = query_start_loc[:-1], query_start_loc.diff()
    is_decode = q_lens == 1
    for selected in (is_decode, ~is_decode):
        for seqs in _groups_that_fit(selected.nonzero()[:, 0], seq_lens, cache_k):
            _attend_batch(q, cache_k, cache_v, starts[seqs], q_lens[seqs], seq_lens[seqs], page_table[seqs],
                    out, scale, window, sinks, softcap, bidirectional_end)  # fmt: skip
    return out


def _groups_that_fit(seqs: Tensor, seq_lens: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    """Splits sequences into groups whose padded keys stay within GATHER_ELEMENTS."""
    if not len(seqs):
        return ()
    longest = int(seq_lens[seqs].max()) * cache.shape[2] * cache.shape[3]
    return seqs.split(max(1, GATHER_ELEMENTS // longest))


def _attend_batch(
    q: Tensor, cache_k: Tensor, cache_v: Tensor, starts: Tensor, q_lens: Tensor, seq_lens: Tensor,
    page_table: Tensor, out: Tensor, scale: float, window: int, sinks: Tensor | None, softcap: float,
    bidirectional_end: Tensor | None,
) -> None:  # fmt: skip
    """Computes one padded batch of sequences and writes the results to the sequences' rows of `out`.

    starts, q_lens, seq_lens [B]; page_table [B, P]. The padding behind a sequence repeats its last key and is masked.
    """
    heads, kv_heads, head_dim = q.shape[1], cache_k.shape[2], q.shape[2]
    first = (seq_lens - q_lens - window + 1).clamp(min=0) if window else torch.zeros_like(seq_lens)
    key_positions = first[:, None] + torch.arange(int((seq_lens - first).max()), device=q.device)  # [B, L]
    slots = _slots(page_table, key_positions.minimum(seq_lens[:, None] - 1), cache_k.shape[1])
    k, v = (_gather(cache, slots, q).transpose(1, 2) for cache in (cache_k, cache_v))  # [B, Hk, L, D]
    if sinks is not None:  # Appends a key and a value of zeros. The mask below adds the sink to the key's score, 0.
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    longest = int(q_lens.max())
    own_masks = sinks is not None or softcap > 0  # if true, each head needs a mask of its own
    rows_at_once = max(1, MASK_ELEMENTS // (key_positions.numel() * (heads if own_masks else heads // kv_heads)))
    for start in range(0, longest, rows_at_once):
        end = min(start + rows_at_once, longest)
        rows = torch.arange(start, end, device=q.device).expand(len(starts), -1)  # [B, M]
        valid = rows < q_lens[:, None]
        tokens = starts[:, None] + rows.minimum(q_lens[:, None] - 1)
        positions = (seq_lens - q_lens)[:, None] + rows
        ends = positions + 1 if bidirectional_end is None else bidirectional_end[tokens]
        mask = _visible_mask(positions, ends, key_positions, window)
        # All query heads that share a key head become rows of one batch: [B, M, Hq, D] -> [B, Hk, group * M, D]
        grouped = q[tokens].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        group_mask = mask.unsqueeze(1).repeat(1, 1, heads // kv_heads, 1)
        if sinks is not None:
            group_mask = _with_sinks(group_mask, sinks.view(kv_heads, -1, 1), q.dtype)
        if softcap:
            mixed = _softcapped(grouped, k, v, group_mask, scale, softcap)
        else:
            mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group_mask, scale=scale)
        mixed = mixed.unflatten(2, (-1, rows.shape[1])).permute(0, 3, 1, 2, 4).reshape(*rows.shape, heads, head_dim)
        out[tokens[valid]] = mixed[valid]


def _slots(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Returns the slots [B, L] of positions [B, L]: their indices in the cache, counted in tokens."""
    return page_table.gather(1, positions // page_size) * page_size + positions % page_size


def _visible_mask(query_positions: Tensor, ends: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """Returns which keys [B, L] each query [B, M] sees, as bool [B, M, L]. ends [B, M]: the end of these keys"""
    mask = key_positions[:, None, :] < ends[:, :, None]
    if window:
        mask &= key_positions[:, None, :] > query_positions[:, :, None] - window
    return mask


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Computes scaled_dot_product_attention in float32, with a soft cap on the scores before the mask is applied."""
    scores = softcap * (q.float() @ k.float().mT * (scale / softcap)).tanh()
    masked = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (masked.softmax(dim=-1) @ v.float()).to(q.dtype)


def _with_sinks(mask: Tensor, sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask [B, Hk or 1, group * M, L] to numbers that are added to scores, plus a column of sinks.

    sinks: the sinks of the heads [Hk, group, 1]
    """
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    added = added.expand(-1, len(sinks), -1, -1)
    column = sinks.expand(-1, -1, mask.shape[2] // sinks.shape[1]).flatten(1)  # [Hk, group * M]
    return torch.cat((added, column[None, :, :, None].expand(len(added), -1, -1, -1).to(dtype)), dim=3)


def _gather(cache: Tensor, slots: Tensor, q: Tensor) -> Tensor:
    """Returns the cache's keys or values at slots [B, L], converted to q's dtype: [B, L, Hk, D]."""
    if cache.dtype == q.dtype:
        return cache.flatten(0, 1)[slots]
    rows = cache.view(torch.uint8).flatten(0, 1)[slots]  # torch cannot index float8
    if has_scales(cache, q.shape[2]):
        return dequantize_rows(rows, cache.dtype, q.shape[2], q.dtype)
    return rows.view(cache.dtype).to(q.dtype)


# Attention among all tokens of a text, in both directions, without a K/V cache: encoders compute whole texts, which lie
# one after another in the rows of a matrix.


def text_attention_torch(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, reach: int = 0) -> Tensor:
    """Returns softmax(scale q k^T) v within each text, [T, Hq, D], rounded to q's dtype once.

    q [T, Hq, D], k and v [T, Hk, D], whose rows may be strided; starts [texts + 1] int32 on the host: the first row of
    each text, and T. reach: a token sees the tokens at most `reach` before and after it; 0: all tokens of its text

    Computes in fp32, one text after another.
    """
    group, out = q.shape[1] // k.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin, end in pairwise(starts.tolist()):
        queries, keys, values = (
            one[begin:end].float().repeat_interleave(times, dim=1).transpose(0, 1)
            for one, times in ((q, 1), (k, group), (v, group))
        )
        scores = (queries @ keys.transpose(1, 2)) * scale
        if reach:
            places = torch.arange(end - begin, device=q.device)
            far = (places[:, None] - places).abs() > reach
            scores = scores.masked_fill(far, float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    return out
