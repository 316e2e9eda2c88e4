"""Calls the C library for CPUs (csrc/, compiled by build.py) with torch tensors.

This module knows tensors and strides, not models or instruction sets (library.py). In every function, the bits of a row
depend on this row only: not on the number of rows, the chunking of a prompt, the page size or the number of threads.
If `available` returns False (other dtypes, other processors, no compiler, SLUICE_NATIVE=0), callers use functions in
plain PyTorch, which also define what each function here computes.

Pointers are passed as plain ints and the GIL is released, so a call costs a few microseconds. The asserts define
which arguments the functions accept.
"""

import ctypes
import mmap
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p

import torch
from torch import Tensor

from worker.kernels.cpu.library import available as available
from worker.kernels.cpu.library import instruction_sets as instruction_sets
from worker.kernels.cpu.library import kernels, library, multiplies_bf16
from worker.kernels.cpu.library import tier as tier
from worker.kernels.cpu.limits import MAX_HEAD_DIM, MAX_KEY_ELEMENTS
from worker.kernels.cpu.packed_experts import ExpertWeight
from worker.kernels.cpu.packed_weight import PANEL, CpuWeight, GemmJob
from worker.kernels.weights.eight_bit_kv import has_scales

AnyWeight = CpuWeight | ExpertWeight
PLAIN, PAIRED = 0, 1  # formats of the K/V cache, with the numbers of csrc/kv_format.h
HEADS, WHOLE, ROTATED_HEADS = 0, 1, 2  # which elements one norm of queries or keys covers (csrc/rowwise.c)
# in the order of FORMATS in csrc/gemm/unpack_blocks.c
BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
EIGHT_BITS = {torch.int8: 2, torch.float8_e4m3fn: 3}  # two more formats of the K/V cache: those with 8-bit codes


def touch_pages(start: int, nbytes: int) -> bool:
    """Writes to every memory page from `start` (4-byte aligned) without changing a byte.

    Returns False, and does nothing, if there is no library.
    """
    found = library()
    if found is not None:
        found.touch_pages(c_void_p(start), c_long(nbytes), c_long(mmap.PAGESIZE))
    return found is not None


def unpack_blocks(
    name: str, rows: Tensor, blocks: int, codes: Tensor, scale: Tensor, minimum: Tensor | None
) -> bool:  # fmt: skip
    """Unpacks a weight's rows [N, bytes] to codes [N, K], and scales and minimums [N, groups].

    name: the block format; blocks: how many blocks a row has
    Returns False, and does nothing, if the library does not know the format or is not available.
    """
    if name not in BLOCK_FORMATS or rows.is_cuda or not kernels() or (found := library()) is None:
        return False
    assert all(tensor is None or tensor.is_contiguous() for tensor in (rows, codes, scale, minimum))
    found.unpack_blocks(
        c_int(BLOCK_FORMATS.index(name)), c_void_p(rows.data_ptr()), c_long(len(rows)), c_long(blocks),
        c_void_p(codes.data_ptr()), c_void_p(scale.data_ptr()),
        c_void_p(None if minimum is None else minimum.data_ptr()), c_int(torch.get_num_threads()),
    )  # fmt: skip
    return True


def linear(x: Tensor, weight: AnyWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """Returns x [T, K] @ weight.T + bias, [T, N], in x's dtype or, if `out_dtype` is float32, unrounded in fp32.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    return linears([(x, weight)], out_dtype)[0]


def linears(jobs: Sequence[tuple[Tensor, AnyWeight]], out_dtype: torch.dtype | None = None) -> list[Tensor]:
    """Returns `linear` for each pair of x and weight. All x have the same dtype.

    The threads share the work of all products, so a small product takes little more time than reading its weight."""
    dtype = jobs[0][0].dtype
    assert out_dtype in (None, dtype, torch.float32)
    outs = [torch.empty(len(x), weight.n, dtype=out_dtype or dtype) for x, weight in jobs]
    structs = (GemmJob * len(jobs))()
    for struct, (x, weight), out in zip(structs, jobs, outs, strict=True):
        assert x.ndim == 2 and x.is_contiguous() and x.dtype == dtype == weight.dtype and x.shape[1] == weight.k
        struct.weights, struct.t = ctypes.addressof(weight.struct), len(x)
        struct.x, struct.out = x.data_ptr(), out.data_ptr()
    if kernels()[dtype].gemm(
        ctypes.addressof(structs), len(jobs), outs[0].dtype == torch.bfloat16, torch.get_num_threads()
    ):  # fmt: skip
        raise MemoryError("no memory for the buffers of a matmul")
    return outs


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool = False) -> Tensor:
    """Computes the same as `rms_norm_torch`, for x [T, H] or [T, heads, D]."""
    x, heads, n = _rows(x)
    _check_norm(weight, x)
    out = torch.empty(x.shape, dtype=x.dtype)
    getattr(kernels()[x.dtype], norm_kind(weight))(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], heads, n, x.stride(0), eps, offset,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Computes the same as `add_rms_norm_torch`: (rms_norm(s), s) with s = scale * x + residual, rounded to the dtype.

    x, residual [T, H] contiguous. Without a weight, both results are s.
    """
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape and x.ndim == 2
    assert x.dtype == residual.dtype
    if weight is not None:
        _check_norm(weight, x)
    out, total = torch.empty_like(x), torch.empty_like(x)
    getattr(kernels()[x.dtype], f"add_{norm_kind(weight)}")(
        x.data_ptr(), residual.data_ptr(), address(weight), out.data_ptr(), total.data_ptr(),
        x.shape[0], x.shape[1], eps, offset, scale, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def norm_kind(weight: Tensor | None) -> str:
    """Returns the name of the C function for a norm with this weight."""
    return "layer_norm" if weight is not None and weight.ndim == 2 else "rms_norm"


def _check_norm(weight: Tensor, x: Tensor) -> None:
    size = x.shape[-1]
    assert weight.dtype == x.dtype and weight.shape in ((size,), (2, size)) and weight.is_contiguous()


def activate(x: Tensor, activation: int, parameters: Tensor | None = None) -> Tensor:
    """Computes the same as `activate_torch`, for x [T, I] contiguous. activation: its index in ACTIVATIONS"""
    assert x.ndim == 2 and x.is_contiguous() and activation in (0, 1, 2, 4)
    assert (activation == 4) == (parameters is not None)
    check_parameters(parameters)
    out = torch.empty_like(x)
    kernels()[x.dtype].activate(
        x.data_ptr(), out.data_ptr(), address(parameters), x.shape[0], x.shape[1], activation, torch.get_num_threads()
    )
    return out


def check_parameters(parameters: Tensor | None) -> None:
    """Asserts that the parameters of an activation have the shape and dtype that the library reads."""
    assert parameters is None or (parameters.shape == (4,) and parameters.dtype == torch.float32)
    assert parameters is None or parameters.is_contiguous()


def act_and_mul(x: Tensor, activation: int) -> Tensor:
    """Computes the same as `act_and_mul_torch`, for x [T, 2 * I] contiguous. activation: its index in ACTIVATIONS"""
    assert x.ndim == 2 and x.is_contiguous() and x.shape[1] % 2 == 0 and activation in (0, 1, 2, 3)
    n = x.shape[1] // 2
    out = torch.empty(x.shape[0], n, dtype=x.dtype)
    up = x.data_ptr() + n * x.element_size()
    kernels()[x.dtype].act_and_mul(
        x.data_ptr(), up, out.data_ptr(), x.shape[0], n, 2 * n, 2 * n, activation, torch.get_num_threads()
    )
    return out


def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Computes the same as `output_gate_torch`, for x and gate [T, N] contiguous."""
    assert x.shape == gate.shape and x.dtype == gate.dtype and x.ndim == 2
    assert x.is_contiguous() and gate.is_contiguous()
    out = torch.empty_like(x)
    kernels()[x.dtype].output_gate(
        x.data_ptr(), gate.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], torch.get_num_threads()
    )
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the same as `rotary_torch`.

    q [T, Hq, D], k [T, Hk, D]; cos, sin [M, D] fp32; positions [T] int64, all below M.
    """
    return _rotate(q, cos, sin, positions), _rotate(k, cos, sin, positions)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    x, heads, d = _rows(x)
    _check_tables(cos, sin, positions, x.shape[0], d)
    out = torch.empty(x.shape, dtype=x.dtype)
    kernels()[x.dtype].rotary(
        x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(),
        x.shape[0], heads, d, x.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    return out


def v_is_paired(cache_v: Tensor) -> bool:
    """Returns whether values of two consecutive tokens are stored interleaved: [pages, page_size / 2, Hk, D, 2] in
    memory.

    Then bf16 kernels multiply by values directly from the cache. This is possible only if pages consist of whole AMX
    tiles. Keys are never interleaved.
    """
    page_size, d = cache_v.shape[1], cache_v.shape[3]
    return cache_v.dtype == torch.bfloat16 and multiplies_bf16() and page_size % PANEL == 0 and d % PANEL == 0


def supports_cache(dtype: torch.dtype, cache: Tensor, head_dim: int) -> bool:
    """Returns whether the library reads and writes `cache` [..., D, or D + 4 in eight bits] for keys and values of
    `dtype`.
    """
    if not available(dtype) or head_dim > MAX_HEAD_DIM or cache.shape[-2] * head_dim > MAX_KEY_ELEMENTS:
        return False
    return cache.dtype == dtype or has_scales(cache, head_dim)


def kv_format(cache_v: Tensor) -> int:
    """Returns the library's number for the format of a cache. The library must support the cache."""
    return EIGHT_BITS.get(cache_v.dtype, PAIRED if v_is_paired(cache_v) else PLAIN)


def store_kv(k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slot_mapping: Tensor) -> None:
    """Does the same as `store_kv_torch`: writes rows of k and v [T, Hk, D] to the slots slot_mapping [T] int64."""
    (k, heads, d), v = _rows(k), _rows(v)[0]
    assert k.shape == v.shape and k.dtype == v.dtype
    _check_cache(cache_k, cache_v, k.dtype, heads, d)
    assert slot_mapping.dtype == torch.int64 and slot_mapping.shape == (k.shape[0],) and slot_mapping.is_contiguous()
    kernels()[k.dtype].store_kv(
        k.data_ptr(), v.data_ptr(), cache_k.data_ptr(), cache_v.data_ptr(), slot_mapping.data_ptr(),
        k.shape[0], heads, d, k.stride(0), v.stride(0), kv_format(cache_v),
    )  # fmt: skip


def qkv_rope_write(
    qkv: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: bool = False,
    norm_last: bool = False,
) -> Tensor:
    """Computes all steps between the qkv matmul and attention in one pass: q/k norm (if given), rotary embedding, K/V
    write.

    norm_last: if true, the norm of queries and keys follows the rotary embedding

    Returns q [T, Hq, D]. qkv [T, (Hq + 2 Hk) * D] contiguous; caches [pages, page_size, Hk, D]; norm weights [D], or
    [Hq * D] and [Hk * D]; v_norm [D]. Without key heads (Hk 0), only queries are computed.
    Gives the same bits as `rms_norm`, `rotary` and `store_kv` one after another.
    """
    kv_heads, d = cache_k.shape[2], cos.shape[1]
    q_heads = qkv.shape[1] // d - 2 * kv_heads
    assert qkv.is_contiguous() and qkv.shape[1] == (q_heads + 2 * kv_heads) * d
    _check_cache(cache_k, cache_v, qkv.dtype, kv_heads, d)
    _check_tables(cos, sin, positions, qkv.shape[0], d)
    assert slot_mapping.dtype == torch.int64 and slot_mapping.shape == (qkv.shape[0],) and slot_mapping.is_contiguous()
    normed = normed_heads(q_norm, d, norm_last)
    assert v_norm is None or (v_norm.dtype == qkv.dtype and v_norm.is_contiguous() and v_norm.shape == (d,))
    for weight, heads in ((q_norm, q_heads), (k_norm, kv_heads)):
        assert weight is None or (weight.dtype == qkv.dtype and weight.is_contiguous())
        assert weight is None or weight.shape == (heads * d if normed == WHOLE else d,)
    q = torch.empty(qkv.shape[0], q_heads, d, dtype=qkv.dtype)
    kernels()[qkv.dtype].qkv_rope_write(
        qkv.data_ptr(), q.data_ptr(), cache_k.data_ptr(), cache_v.data_ptr(), address(q_norm), address(k_norm),
        address(v_norm), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(), eps, offset,
        qkv.shape[0], q_heads, kv_heads, d, normed, kv_format(cache_v), torch.get_num_threads(),
    )  # fmt: skip
    return q


def normed_heads(q_norm: Tensor | None, d: int, norm_last: bool) -> int:
    """Returns HEADS, WHOLE or ROTATED_HEADS: which elements one norm of queries or keys covers."""
    whole = q_norm is not None and len(q_norm) != d
    assert not (whole and norm_last)
    return WHOLE if whole else ROTATED_HEADS if norm_last else HEADS


def attention(
    q: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    max_kv_len: int = 0,
    *,
    scale: float,
    window: int,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    visible_to: Tensor | None = None,
) -> Tensor:
    """Computes the same as `attention_torch`, but reads pages in place. q [T, Hq, D], with D at most 512.

    max_kv_len is ignored, because the library reads seq_lens itself.

    Raises MemoryError when there is no memory for the threads' buffers.
    """
    q, heads, d = _rows(q)
    kv_heads, size = cache_k.shape[2], cache_k.shape[1]
    _check_cache(cache_k, cache_v, q.dtype, kv_heads, d)
    assert heads % kv_heads == 0 and d <= MAX_HEAD_DIM and scale > 0 and softcap >= 0
    check_sinks(sinks, heads)
    assert query_start_loc.dtype == seq_lens.dtype == page_table.dtype == torch.int32
    assert query_start_loc.is_contiguous() and seq_lens.is_contiguous() and page_table.stride(1) == 1
    assert len(query_start_loc) == len(seq_lens) + 1 == len(page_table) + 1
    out = torch.empty(q.shape, dtype=q.dtype)
    if kernels()[q.dtype].attention(
        q.data_ptr(), cache_k.data_ptr(), cache_v.data_ptr(), query_start_loc.data_ptr(), seq_lens.data_ptr(),
        page_table.data_ptr(), address(sinks), rows_visible(visible_to, len(q)), out.data_ptr(), len(seq_lens),
        q.stride(0), heads, kv_heads, d, size, page_table.stride(0), window, kv_format(cache_v), scale, softcap,
        torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError("no memory for the scratch of attention")
    return out


def address(x: Tensor | None) -> int | None:
    """Returns the address of a tensor's first element; None for None."""
    return None if x is None else x.data_ptr()


def rows_visible(visible_to: Tensor | None, rows: int) -> int | None:
    """Returns the address of visible_to [rows] int32, or None. visible_to: as in attention_torch"""
    if visible_to is not None:
        assert visible_to.dtype == torch.int32 and visible_to.shape == (rows,) and visible_to.is_contiguous()
    return address(visible_to)


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Returns x, its number of heads and its D, for x [T, heads, D] or [T, D] (one head).

    Copies x unless the heads of each token are contiguous.
    """
    heads, d = x.shape[1:] if x.ndim == 3 else (1, x.shape[1])
    contiguous = x.stride(-1) == 1 and (heads == 1 or x.stride(1) == d)
    return (x if contiguous else x.contiguous()), heads, d


def _check_cache(cache_k: Tensor, cache_v: Tensor, dtype: torch.dtype, heads: int, d: int) -> None:
    assert cache_k.shape == cache_v.shape and cache_k.dtype == cache_v.dtype and supports_cache(dtype, cache_k, d)
    assert cache_k.shape[2] == heads and (has_scales(cache_k, d) or cache_k.shape[3] == d)
    assert cache_k.is_contiguous() and cache_v.is_contiguous()


def _check_tables(cos: Tensor, sin: Tensor, positions: Tensor, t: int, d: int) -> None:
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape and cos.shape[1] == d and d % 2 == 0
    assert cos.is_contiguous() and sin.is_contiguous()
    assert positions.dtype == torch.int64 and positions.shape == (t,) and positions.is_contiguous()
