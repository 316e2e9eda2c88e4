"""The Triton kernel of write.py: one program copies one token's keys and values."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, cache_k_ptr, cache_v_ptr, slots_ptr, k_stride, v_stride, ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < ROW
    target = tl.load(slots_ptr + token) * ROW + column
    tl.store(cache_k_ptr + target, tl.load(k_ptr + token * k_stride + column, mask=inside), mask=inside)
    tl.store(cache_v_ptr + target, tl.load(v_ptr + token * v_stride + column, mask=inside), mask=inside)


def write_kv_triton(k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slots: Tensor) -> None:
    tokens, heads, size = k.shape
    assert v.shape == k.shape and slots.shape == (tokens,)
    assert k.stride()[1:] == v.stride()[1:] == (size, 1), "only whole tokens may be strided"
    assert cache_k.shape == cache_v.shape and cache_k.shape[2:] == (heads, size)
    assert cache_k.is_contiguous() and cache_v.is_contiguous()
    row = heads * size
    _write_kernel[(tokens,)](
        k, v, cache_k, cache_v, slots, k.stride(0), v.stride(0), ROW=row, BLOCK=triton.next_power_of_2(row)
    )
