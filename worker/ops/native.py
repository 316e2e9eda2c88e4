"""Chooses the C library's functions for this processor's best instruction set, or for a lower one named by SLUICE_ISA.

This module knows names, signatures and instruction sets. bindings.py knows what the functions do.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from worker.kernels.cpu.build import begin, built
from worker.kernels.cpu.instruction_set import EXTENDS, TIERS, VARIABLE, best_of, highest_allowed

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
    "qkv_rope_write": _POINTERS * 11 + (c_float, c_float) + _LONGS * 4 + (c_int, c_int, c_int),
    "add_product": _POINTERS * 3 + _LONGS + (c_float,),
    "multiply_a": _POINTERS + _LONGS * 2,
    "add_b": _POINTERS * 2 + _LONGS * 4,
    "gemm": _POINTERS + _LONGS + (c_int, c_int),
    "attention": _POINTERS * 9 + _LONGS * 8 + (c_int, c_float, c_float, c_int),
    "store_kv": _POINTERS * 5 + _LONGS * 5 + (c_int,),
    "delta_net": _POINTERS * 2,
    "mamba2": _POINTERS * 2,
    "short_conv": _POINTERS * 2,
    "pack": _POINTERS * 2 + _LONGS * 2 + (c_int,),
}


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
        bound.argtypes, bound.restype = _SIGNATURES[name], c_int if name in ("gemm", "attention") else None
        return cast(Call, bound)

    return Kernels(**{name: function(name) for name in _SIGNATURES})
