"""Measures the highest speed of this machine: of reading memory, and of multiply-adds in the instruction set in use.

From these speeds follows a lower bound (floor) for the time of a kernel, with which its measured time is compared. All
figures are sums over all threads.
"""

import ctypes
import time
from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import partial

import torch

from worker.ops import native as library

MEMORY = 512 << 20  # how many bytes are read: more than the caches of most processors hold
TRIES = 4
TRY_S = 0.04  # about how long one try of multiply-adds takes

# floating-point operations of one round in one thread: two for each multiply-add
ROUND_FLOPS = {
    "floor_fp32_avx2": 2 * 12 * 8,
    "floor_fp32_neon": 2 * 12 * 8,
    "floor_fp32_avx512": 2 * 12 * 16,
    "floor_bf16_avx512bf16": 2 * 12 * 32,
    "floor_bf16_amx": 2 * 4 * 16 * 16 * 32,
}


@dataclass(frozen=True, slots=True)
class Floors:
    read_gb_s: float
    fp32_gflop_s: float
    bf16_gflop_s: float | None  # None: the instruction set cannot multiply bf16 numbers


def measure(threads: int) -> Floors | None:
    """Measures the speeds, which takes about a second. Returns None if the C library is not available."""
    found, tier = library.library(), library.tier()
    if found is None or tier == "none":
        return None
    plain, _ = library.instruction_sets(torch.float32)
    bf16 = _gflop_s(found, f"floor_bf16_{tier}", threads) if library.multiplies_bf16() else None
    return Floors(_read_gb_s(threads), _gflop_s(found, f"floor_fp32_{plain}", threads), bf16)


def reading(memory: torch.Tensor, threads: int) -> Callable[[], None]:
    """Returns a function that reads all bytes of `memory` once. The C library must be available, and the memory must
    have been written: otherwise it may be mapped to a single page of zeros."""
    found, (simd, _) = library.library(), library.instruction_sets(torch.float32)
    assert found is not None
    read = getattr(found, f"floor_read_{simd}")
    read.argtypes, read.restype = (c_void_p, c_long, c_int), None
    return lambda: read(memory.data_ptr(), memory.nbytes, threads)


def _read_gb_s(threads: int) -> float:
    memory = library.huge_pages(torch.empty(MEMORY, dtype=torch.uint8)).fill_(1)
    return MEMORY / _fastest(reading(memory, threads)) / 1e9


def _gflop_s(found: ctypes.CDLL, name: str, threads: int) -> float:
    multiply = getattr(found, name)
    multiply.argtypes, multiply.restype = (c_long, c_int), None
    rounds = 1000
    while (took := _seconds(partial(multiply, rounds, threads))) < TRY_S / 2:
        rounds = int(rounds * min(10.0, TRY_S / max(took, 1e-6)) + 1)
    return ROUND_FLOPS[name] * rounds * threads / _fastest(partial(multiply, rounds, threads)) / 1e9


def _fastest(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(TRIES))


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
