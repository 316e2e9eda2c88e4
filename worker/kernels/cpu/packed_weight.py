"""Packs weights for the matmul of the C library: tensors, or codes with scales (quantized_weight.py).

A packed weight is a list of C structs (csrc/gemm/weight.h), one for each format among its rows. This module knows the
layout of memory; pack.c and pack_codes.c fill it.
"""

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.cpu.library import available, kernels, library, multiplies_bf16
from worker.kernels.quantized_weight import E4M3, INT4, INT8, QuantizedWeight, stack

PANEL = 32  # columns of a packed panel
K_STEP = 32  # k-step of bf16 panels
CODE_BLOCK = 16  # inputs of a block of codes
HUGE_PAGE = 1 << 21  # bytes
PLAIN, TABLE = 0, 2  # kinds of numbers in weight.h: those of the weight's dtype, and 4-bit codes with a table of values
KINDS = {INT4: 1, INT8: 3, E4M3: 4}  # kinds whose codes the library converts by arithmetic
E4M3_FACTOR = 256.0  # the library reads e4m3 as fp16, whose exponent means 2^8 times less


class WeightStruct(Structure):
    """struct Weight of csrc/gemm/weight.h."""


WeightStruct._fields_ = [
    *((name, c_void_p) for name in ("panels", "bias", "input_order", "values")),
    ("next", POINTER(WeightStruct)),
    *((name, c_long) for name in ("n", "k", "group")),
    *((name, c_int) for name in ("kind", "has_minimum", "scale_bytes")),
    ("factor", c_float),
]


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A weight [n, k], packed for the matmul of inputs of `dtype`, with its bias."""

    n: int
    k: int
    dtype: torch.dtype
    struct: WeightStruct
    memory: tuple[object, ...]  # keeps alive what the struct points to

    @property
    def nbytes(self) -> int:
        """The bytes that a product reads."""
        return sum(part.nbytes for part in self.memory if isinstance(part, Tensor))


def pack_weight(
    parts: Sequence[Tensor | QuantizedWeight], bias: Tensor | None = None, *, dtype: torch.dtype
) -> CpuWeight:
    """Packs one weight [N, K] whose rows are those of `parts`, one after another, for inputs of `dtype`.

    A part is a contiguous tensor of `dtype`, or quantized. Its scales and minimums keep 24 bits for float32 inputs, and
    11 bits (fp16 times a power of two) for bfloat16. bias [N] is kept in fp32.
    """
    assert available(dtype)
    structs: list[WeightStruct] = []
    memory: list[object] = []
    begin = 0
    for part in _merge(parts):
        n = part.shape[0]
        struct, tensors = _pack_codes(part, dtype) if isinstance(part, QuantizedWeight) else _pack_tensor(part, dtype)
        if bias is not None:
            tensors.append(bias[begin : begin + n].float().contiguous())
            struct.bias = tensors[-1].data_ptr()
        if structs:
            structs[-1].next = ctypes.pointer(struct)
        structs.append(struct)
        memory += tensors
        begin += n
    assert bias is None or bias.shape == (begin,)
    assert all(struct.k == structs[0].k for struct in structs)
    return CpuWeight(begin, structs[0].k, dtype, structs[0], (*memory, *structs))


def _merge(parts: Sequence[Tensor | QuantizedWeight]) -> list[Tensor | QuantizedWeight]:
    """Concatenates all parts if they are tensors, and neighbours in the same format if they are quantized."""
    if all(isinstance(part, Tensor) for part in parts):
        tensors = [part for part in parts if isinstance(part, Tensor)]
        return [torch.cat(tensors) if len(tensors) > 1 else tensors[0]]
    if all(isinstance(part, QuantizedWeight) for part in parts):
        return [*stack([part for part in parts if isinstance(part, QuantizedWeight)])]
    return [*parts]


def _pack_tensor(weight: Tensor, dtype: torch.dtype) -> tuple[WeightStruct, list[Tensor]]:
    n, k = weight.shape
    assert weight.dtype == dtype and weight.is_contiguous()
    depth = -(-k // K_STEP) * K_STEP if dtype == torch.bfloat16 else k
    panels = huge_pages(_aligned(-(-n // PANEL), depth, PANEL, dtype=dtype))
    kernels()[dtype].pack(weight.data_ptr(), panels.data_ptr(), n, k, torch.get_num_threads())
    return WeightStruct(panels=panels.data_ptr(), n=n, k=k, kind=PLAIN), [panels]


def _pack_codes(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[WeightStruct, list[Tensor]]:
    n, k = weight.shape
    found, scale_bytes = library(), 4 if dtype == torch.float32 else 2
    assert found is not None and (weight.code_map.bits == 4 or weight.code_map in KINDS)
    group = weight.group_size if weight.group_size < k else -(-k // CODE_BLOCK) * CODE_BLOCK
    has_minimum, block_bytes = weight.minimum is not None, CODE_BLOCK * PANEL * weight.code_map.bits // 8
    group_bytes = PANEL * scale_bytes * (1 + has_minimum) + group // CODE_BLOCK * block_bytes
    panels = huge_pages(_aligned(-(-n // PANEL), -(-k // group), group_bytes, dtype=torch.uint8))
    values = torch.tensor(weight.code_map.values if weight.code_map.bits == 4 else (0.0,) * 16)
    struct = WeightStruct(
        panels=panels.data_ptr(), values=values.data_ptr(), n=n, k=k, group=group,
        kind=KINDS.get(weight.code_map, TABLE), has_minimum=has_minimum, scale_bytes=scale_bytes,
        factor=1.0 if scale_bytes == 4 else _factor(weight),
    )  # fmt: skip
    codes, scale = weight.codes.contiguous(), weight.scale.contiguous()
    minimum = None if weight.minimum is None else weight.minimum.contiguous()
    found.pack_codes(
        ctypes.byref(struct), c_void_p(codes.data_ptr()), c_void_p(scale.data_ptr()),
        c_void_p(None if minimum is None else minimum.data_ptr()),
        c_int(dtype == torch.bfloat16 and multiplies_bf16()), c_int(torch.get_num_threads()),
    )  # fmt: skip
    if weight.code_map is E4M3:
        assert not has_minimum
        struct.factor *= E4M3_FACTOR
    if weight.input_order is None:
        return struct, [panels, values]
    order = weight.input_order.long().contiguous()
    struct.input_order = order.data_ptr()
    return struct, [panels, values, order]


def _factor(weight: QuantizedWeight) -> float:
    """Returns the power of two that brings the largest scale or minimum near the end of fp16's range."""
    largest = max(x.abs().max().item() for x in (weight.scale, weight.minimum) if x is not None)
    return 2.0 ** (math.frexp(largest)[1] - 15) if largest else 1.0


def _aligned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns uninitialized memory. Large memory is aligned to huge pages, so that they can hold nearly all of it."""
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = torch.empty(nbytes + (HUGE_PAGE if nbytes >= HUGE_PAGE else 0), dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    return buffer[start : start + nbytes].view(dtype).view(shape)


def huge_pages(fresh: Tensor) -> Tensor:
    """Requests huge pages for `fresh` (contiguous, not written yet) and returns it. Reading the tensor then causes
    no TLB misses."""
    found = library()
    if found is not None:
        found.advise_huge_pages(c_void_p(fresh.data_ptr()), c_long(fresh.nbytes))
    return fresh
