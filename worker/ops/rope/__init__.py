"""Rotary embedding and K/V write, alone or with the norms before them: chooses which form runs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from worker.ops import paged_kv
from worker.ops.choose import choosing, has_dtype
from worker.ops.launch_options import NO_OPTIONS, GpuOptions
from worker.ops.norm import rms_norm
from worker.ops.norm.reference import sum_split_k
from worker.ops.rope import native
from worker.ops.rope.reference import qkv_rope_write_torch, rotary_torch, store_kv_torch


def _can_write(k: Tensor, v: Tensor, cache_k: Tensor, *_: Any) -> bool:
    return paged_kv.supports_cache(k.dtype, cache_k, k.shape[2])


rotary = choosing(rotary_torch, "worker.ops.rope.triton.rotary_triton", native.rotary, has_dtype)
store_kv = choosing(store_kv_torch, "worker.ops.rope.triton.store_kv_triton", native.store_kv, _can_write)
# Computes qkv_rope_write by three operations in a row, with the same bits.
qkv_rope_write_unfused = partial(qkv_rope_write_torch, norm=rms_norm, rotate=rotary, write=store_kv)


def qkv_rope_write(
    qkv: Tensor, cache_k: Tensor, cache_v: Tensor | None, cos: Tensor, *args: Tensor,
    q_norm: Tensor | None, dtype: torch.dtype, options: GpuOptions = NO_OPTIONS, **named: Any,
) -> Tensor:  # fmt: skip
    """Computes the same as qkv_rope_write_torch. On a GPU, it is one kernel unless a norm covers all heads of a row."""
    if qkv.is_cuda and (q_norm is None or len(q_norm) == cos.shape[1]):
        from worker.ops.rope.triton import qkv_rope_write_triton

        return qkv_rope_write_triton(
            qkv, cache_k, cache_v, cos, *args, q_norm=q_norm, dtype=dtype, options=options, **named
        )
    if not qkv.is_cuda and paged_kv.supports_cache(dtype, cache_k, cos.shape[1]):
        summed = sum_split_k(qkv, 2, dtype)
        return native.qkv_rope_write(summed, cache_k, cache_v, cos, *args, q_norm=q_norm, **named)
    return qkv_rope_write_unfused(qkv, cache_k, cache_v, cos, *args, q_norm=q_norm, dtype=dtype, **named)
