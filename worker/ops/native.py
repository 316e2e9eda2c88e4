"""Chooses the C library's functions for this processor's best instruction set, or for a lower one named by SLUICE_ISA.

This module knows names, signatures and instruction sets. ops/native.py knows what the functions do.
"""

import ctypes
import logging
import math
import mmap
import os
import re
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from worker.ops.native_build import EXTENDS, TIERS, VARIABLE, begin, best_of, built, highest_allowed

log = logging.getLogger("sluice.kernels")
Call = Callable[..., int]
_POINTERS, _LONGS = (c_void_p,), (c_long,)
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "rms_norm": _POINTERS * 3 + _LONGS * 4 + (c_float, c_float, c_int),
    "add_rms_norm": _POINTERS * 5 + _LONGS * 2 + (c_float, c_float, c_float, c_int),
    "layer_norm": _POINTERS * 3 + _LONGS * 4 + (c_float, c_float, c_int),
    "add_layer_norm": _POINTERS * 5 + _LONGS * 2 + (c_float, c_float, c_float, c_int),
    "activate": _POINTERS * 3 + _LONGS * 2 + (c_int, c_int),
    "act_and_mul": _POINTERS * 3 + _LONGS * 4 + (c_int, c_int),
    "scale_rows": _POINTERS * 3 + _LONGS * 2 + (c_int,),
    "output_gate": _POINTERS * 3 + _LONGS * 2 + (c_int,),
    "combine": _POINTERS * 6 + _LONGS * 3 + (c_int,),
    "rotary": _POINTERS * 5 + _LONGS * 4 + (c_int,),
    "qkv_rope_write": _POINTERS * 12 + (c_float, c_float) + _LONGS * 4 + (c_int, c_int, c_int),
    "add_product": _POINTERS * 3 + _LONGS + (c_float,),
    "multiply_a": _POINTERS + _LONGS * 2,
    "add_b": _POINTERS * 2 + _LONGS * 4,
    "gemm": _POINTERS + _LONGS + (c_int, c_int),
    "attention": _POINTERS * 9 + _LONGS * 8 + (c_int, c_float, c_float, c_int),
    "text_attention": _POINTERS * 5 + _LONGS * 8 + (c_float, c_int),
    "store_kv": _POINTERS * 6 + _LONGS * 5 + (c_int,),
    "delta_net": _POINTERS * 2,
    "mamba2": _POINTERS * 2,
    "short_conv": _POINTERS * 2,
    "pack": _POINTERS * 2 + _LONGS * 2 + (c_int,),
}
FALLIBLE = ("gemm", "attention", "text_attention")  # these return 1 if there is no memory for their scratch


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library's functions for one dtype on this processor."""

    rms_norm: Call
    add_rms_norm: Call
    layer_norm: Call
    add_layer_norm: Call
    activate: Call
    act_and_mul: Call
    output_gate: Call
    combine: Call
    scale_rows: Call
    rotary: Call
    qkv_rope_write: Call
    add_product: Call
    multiply_a: Call
    add_b: Call
    gemm: Call
    attention: Call
    text_attention: Call
    store_kv: Call
    delta_net: Call
    mamba2: Call
    short_conv: Call
    pack: Call


def available(dtype: torch.dtype) -> bool:
    """Returns whether the library can be used for tensors of `dtype`. The first call may compile the library."""
    return dtype in kernels()


def tier() -> str:
    """Returns the name of the instruction set in use, one of TIERS."""
    return TIERS[level()]


def multiplies_bf16() -> bool:
    """Returns whether the instruction set in use multiplies pairs of bf16 numbers directly, without converting them to
    fp32.
    """
    return tier() in ("avx512bf16", "amx")


def wait_for_library(on_progress: Callable[[], None]) -> None:
    """Waits until the library is compiled, if it is in use. on_progress: called when a part of it is compiled"""
    if _switched_on():
        begin().result(on_progress)


@cache
def library() -> ctypes.CDLL | None:
    """Loads the library, and waits for it if it is being compiled. Returns None if it is switched off or cannot be
    compiled here."""
    path = built() if _switched_on() else None
    return ctypes.CDLL(str(path)) if path else None


def _switched_on() -> bool:
    return os.environ.get("SLUICE_NATIVE", "1") != "0"


@cache
def level() -> int:
    """Returns the index in TIERS of the processor's best instruction set, but at most the one that SLUICE_ISA names.

    Raises ValueError if SLUICE_ISA is invalid.
    """
    found, allowed = library(), highest_allowed(os.environ)
    if found is None:
        return 0
    best = best_of(found, allowed)
    if os.environ.get(VARIABLE) and allowed != best:
        log.warning("%s=%s: this processor lacks it, so %s is used", VARIABLE, os.environ[VARIABLE], TIERS[best])
    return best


@cache
def kernels() -> dict[torch.dtype, Kernels]:
    """Returns the library's functions by dtype; an empty dict if the library is not available."""
    found = library()
    if found is None or not level():
        return {}
    return {
        torch.float32: _bind(found, "f32", *instruction_sets(torch.float32)),
        torch.bfloat16: _bind(found, "bf16", *instruction_sets(torch.bfloat16)),
    }


def instruction_sets(dtype: torch.dtype) -> tuple[str, str]:
    """Returns two instruction sets for a dtype: one for most functions, and one for matmul and attention."""
    best = tier()
    if dtype is torch.bfloat16:
        return EXTENDS.get(best, best), best
    plain = "avx512" if multiplies_bf16() else EXTENDS.get(best, best)
    return plain, plain


def _bind(found: ctypes.CDLL, dtype: str, simd: str, matmul: str) -> Kernels:
    def function(name: str) -> Call:
        # "pack" is compiled once for all instruction sets, and has the last of these names.
        names = (f"{name}_{dtype}_{matmul}", f"{name}_{dtype}_{simd}", f"{name}_{dtype}")
        bound = next(getattr(found, each) for each in names if hasattr(found, each))
        bound.argtypes, bound.restype = _SIGNATURES[name], c_int if name in FALLIBLE else None
        return cast(Call, bound)

    return Kernels(**{name: function(name) for name in _SIGNATURES})


# The limits of the C library's fixed-size arrays. They are read from csrc/model_limits.h, so C and Python agree.

_HEADER = Path(__file__).with_name("csrc") / "model_limits.h"
_NUMBERS = {
    name: int(number) for name, number in re.findall(r"^#define (\w+) (\d+)", _HEADER.read_text(), re.MULTILINE)
}
MAX_HEAD_DIM = _NUMBERS["MAX_HEAD_DIM"]  # elements of an attention head
MAX_KEY_ELEMENTS = _NUMBERS["MAX_KEY_ELEMENTS"]  # elements of all key heads of a token in one layer
MAX_TAPS = _NUMBERS["MAX_TAPS"]  # tokens that a convolution covers
MAX_CHOSEN = _NUMBERS["MAX_CHOSEN"]  # experts that are chosen for a row
MAX_GROUPS = _NUMBERS["MAX_GROUPS"]  # groups of experts


# Allocates memory in huge pages, so that reading it causes few TLB misses. In pages of 4 KB, a weight is read up to a
# seventh slower.

HUGE_PAGE = 1 << 21  # bytes
PIECE = 1 << 26  # bytes
PANEL = 32  # columns of a panel of a packed weight (linear/csrc/weight.h)
ALIGNMENT = 64  # every tensor in a piece begins at a multiple of this many bytes
Memory = Callable[[Sequence[int], torch.dtype], Tensor]  # returns uninitialized memory of the given shape and dtype


def fresh_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns uninitialized memory. Large memory is aligned to huge pages, so that nearly all of it can be in them."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < HUGE_PAGE:
        return torch.empty(*shape, dtype=dtype)
    buffer = torch.empty(nbytes + HUGE_PAGE, dtype=torch.uint8)
    start = -buffer.data_ptr() % HUGE_PAGE
    return huge_pages(buffer[start : start + nbytes]).view(dtype).view(*shape)


def huge_pages(fresh: Tensor) -> Tensor:
    """Requests huge pages for `fresh` (contiguous, not written yet) and returns `fresh`. Reading this memory then
    causes few TLB misses.
    """
    found = library()
    if found is not None:
        found.advise_huge_pages(c_void_p(fresh.data_ptr()), c_long(fresh.nbytes))
    return fresh


class Pieces:
    """Allocates tensors inside large pieces of memory, so that tensors smaller than a huge page are in huge pages, too.

    A piece is freed with the last of its tensors. Parts of a piece that were never written take no physical memory.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # how many bytes of the piece are in use

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory. A large tensor gets a piece of its own."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > PIECE // 4:
            return fresh_memory(shape, dtype)
        if self._used + nbytes > self._piece.nbytes:
            self._piece, self._used = fresh_memory((PIECE,), torch.uint8), 0
        begin, self._used = self._used, self._used + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._piece[begin : begin + nbytes].view(dtype).view(*shape)


# Calls the C library for CPUs (csrc/, compiled by native_build.py) with torch tensors.
#
# This part knows tensors and strides, not models or instruction sets . In every function, the bits of
# a row depend on this row only: not on the number of rows, the chunking of a prompt, the page size or the number of
# threads. If `available` returns False (other dtypes, other processors, no compiler, SLUICE_NATIVE=0), callers use
# functions in plain PyTorch, which also define what each function here computes.
#
# Pointers are passed as plain ints and the GIL is released, so a call costs a few microseconds. The asserts define
# which arguments the functions accept.


def touch_pages(start: int, nbytes: int) -> bool:
    """Writes to every memory page from `start` (4-byte aligned) without changing a byte.

    Returns False, and does nothing, if there is no library.
    """
    found = library()
    if found is not None:
        found.touch_pages(c_void_p(start), c_long(nbytes), c_long(mmap.PAGESIZE))
    return found is not None


def address(x: Tensor | None) -> int | None:
    """Returns the address of a tensor's first element; None for None."""
    return None if x is None else x.data_ptr()


def contiguous_heads(x: Tensor) -> tuple[Tensor, int, int]:
    """Returns x, its number of heads and its D, for x [T, heads, D] or [T, D] (one head).

    Copies x unless the heads of each token are contiguous.
    """
    heads, d = x.shape[1:] if x.ndim == 3 else (1, x.shape[1])
    contiguous = x.stride(-1) == 1 and (heads == 1 or x.stride(1) == d)
    return (x if contiguous else x.contiguous()), heads, d
