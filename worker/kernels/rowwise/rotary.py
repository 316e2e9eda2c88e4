"""Applies rotary position embedding in the "rotate half" convention: dimensions i and i + D / 2 rotate together.

A row of the fp32 tables is as long as a head; both halves of a row are equal. The rotation is computed in fp32 and
rounded once. (Hugging Face casts the tables to the model's dtype first. For a model in fp32, the results are the same
in every bit.)
"""

import torch
from torch import Tensor


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same as `rotary_torch` for batches q [B, Hq, S, D] and k [B, Hk, S, D].

    cos, sin: either [S, D], for all sequences, or [B, S, D], with a table for the positions of each sequence.
    Raises ValueError for tables of any other rank.
    """
    if cos.ndim not in (2, 3):
        raise ValueError(f"cos must be [seq, head_dim] or [batch, seq, head_dim], got {tuple(cos.shape)}")
    batch, _, length, size = q.shape
    rows = torch.arange(length if cos.ndim == 2 else batch * length, device=q.device)
    positions = rows.repeat(batch) if cos.ndim == 2 else rows
    flat_q, flat_k = (x.transpose(1, 2).reshape(batch * length, -1, size) for x in (q, k))
    out_q, out_k = rotary_torch(flat_q, flat_k, cos.reshape(-1, size), sin.reshape(-1, size), positions)
    return _unflatten(out_q, batch), _unflatten(out_k, batch)


def rotary_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates all heads of row t by row positions[t] of the tables.

    q [T, Hq, D], k [T, Hk, D], whose rows may be strided; cos, sin [M, D] fp32; positions [T] int64, all below M.
    Returns contiguous tensors of the same shapes and dtypes.
    """
    cos_t, sin_t = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, D]
    return _rotate(q, cos_t, sin_t), _rotate(k, cos_t, sin_t)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x_fp32 = x.float()
    low, high = x_fp32.chunk(2, dim=-1)
    return (x_fp32 * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def _unflatten(x: Tensor, batch: int) -> Tensor:
    """Reshapes [B * S, H, D] to [B, H, S, D]."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()
