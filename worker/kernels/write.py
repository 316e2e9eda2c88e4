"""Writes a step's keys and values into the paged cache. Knows slots, not sequences."""

from torch import Tensor

from worker.kernels import native


def write_kv(k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slots: Tensor) -> None:
    """Store row t of k and v at slot slots[t] = page * page_size + offset, in place.

    k, v [T, Hk, D], tokens may be strided; cache_k, cache_v [pages, page_size, Hk, D] contiguous; slots [T] int64,
    distinct except for the scratch page's.
    """
    if k.is_cuda:
        from worker.kernels.write_triton import write_kv_triton

        return write_kv_triton(k, v, cache_k, cache_v, slots)
    if native.available(k.dtype):
        return native.write_kv(k, v, cache_k, cache_v, slots)
    return write_kv_torch(k, v, cache_k, cache_v, slots)


def write_kv_torch(k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slots: Tensor) -> None:
    cache_k.flatten(0, 1).index_copy_(0, slots, k.to(cache_k.dtype))
    cache_v.flatten(0, 1).index_copy_(0, slots, v.to(cache_v.dtype))
