"""Writes the keys and values of a step to the paged cache. This module knows slots, not sequences."""

import torch
from torch import Tensor

from worker.kernels.weights.eight_bit_kv import has_scales, quantize_rows


def store_kv_torch(k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slot_mapping: Tensor) -> None:
    """Writes row t of k and v to slot slot_mapping[t] = page * page_size + offset of the caches, in place.

    k, v [T, Hk, D], whose rows may be strided; cache_k, cache_v contiguous: either [pages, page_size, Hk, D] of k's
    dtype or float8_e4m3fn (values are clamped to +-448), or [pages, page_size, Hk, D + 4] with codes and their scale
    (eight_bit_kv.py); slot_mapping [T] int64, with distinct slots except in the scratch page.
    """
    for new, cache in ((k, cache_k), (v, cache_v)):
        if has_scales(cache, k.shape[2]):
            new, cache = quantize_rows(new, cache.dtype), cache.view(torch.uint8)
        elif cache.dtype == torch.float8_e4m3fn:  # torch cannot index float8
            limit = torch.finfo(cache.dtype).max
            new, cache = new.clamp(-limit, limit).to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
        cache.flatten(0, 1).index_copy_(0, slot_mapping, new.to(cache.dtype))
