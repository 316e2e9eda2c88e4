"""Calls the C library's sampling and log-probabilities (csrc/sample.c) with torch tensors."""

from collections.abc import Callable
from ctypes import CDLL, c_int, c_long, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from worker.ops.native import instruction_sets, library
from worker.ops.sampling.reference import EVERY, PlainParams, Stages, first_highest


def sample_native(logits: Tensor, params: PlainParams, stages: Stages = EVERY) -> Tensor:
    """Computes the same as `sample_torch`, in a twentieth of its time or less."""
    if stages.all_greedy:
        return first_highest(logits)
    logits, rows, width = _checked(logits)
    columns = (params.temperature, params.top_p, params.min_p, params.top_k, params.seeds, params.positions)
    assert all([column.shape == (rows,) and (rows == 1 or column.stride(0) == 1) for column in columns])
    assert [column.dtype for column in columns] == [torch.float32] * 3 + [torch.int64] * 3
    functions, threads = _functions(), max(1, min(torch.get_num_threads(), rows))
    scratch = torch.empty(threads * functions.scratch_bytes(width), dtype=torch.uint8)
    ids = torch.empty(rows, dtype=torch.int64)
    functions.sample(
        logits.data_ptr(), rows, width, logits.stride(0), *[column.data_ptr() for column in columns],
        scratch.data_ptr(), ids.data_ptr(), threads,
    )  # fmt: skip
    return ids


def logprobs_native(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the same as `logprobs_torch`. Raises IndexError if an id is not in [0, V)."""
    logits, rows, width = _checked(logits)
    ids = ids.contiguous()
    if rows and not 0 <= int(ids.min()) <= int(ids.max()) < width:
        raise IndexError(f"ids of tokens must be at least 0 and less than {width}")
    assert ids.shape == (rows,) and ids.dtype == torch.int64 and 0 <= top <= width
    functions, threads = _functions(), max(1, min(torch.get_num_threads(), rows))
    scratch = torch.empty(threads * functions.scratch_bytes(width), dtype=torch.uint8)
    chosen, values = torch.empty(rows), torch.empty(rows, top)
    best = torch.empty(rows, top, dtype=torch.int64)
    functions.logprobs(
        logits.data_ptr(), rows, width, logits.stride(0), ids.data_ptr(), top, scratch.data_ptr(),
        chosen.data_ptr(), best.data_ptr(), values.data_ptr(), threads,
    )  # fmt: skip
    return chosen, best, values


def _checked(logits: Tensor) -> tuple[Tensor, int, int]:
    """Returns logits [R, V] whose rows are contiguous, R and V."""
    rows, width = logits.shape
    assert logits.dtype == torch.float32 and logits.device.type == "cpu" and 0 < width < 1 << 31
    return logits if width == 1 or logits.stride(1) == 1 else logits.contiguous(), rows, width


class _Functions(NamedTuple):
    sample: Callable[..., None]
    logprobs: Callable[..., None]
    scratch_bytes: Callable[[int], int]  # of a row's width: how much memory each thread needs


def _functions() -> _Functions:
    found = library()
    assert found is not None
    return _bound(found, instruction_sets(torch.float32)[0])


@cache
def _bound(found: CDLL, simd: str) -> _Functions:
    sample, logprobs, scratch_bytes = [
        getattr(found, f"{name}_{simd}") for name in ("sample", "logprobs", "sample_scratch")
    ]
    sample.argtypes, sample.restype = (c_void_p,) + (c_long,) * 3 + (c_void_p,) * 8 + (c_int,), None
    logprobs.argtypes = (c_void_p,) + (c_long,) * 3 + (c_void_p, c_long) + (c_void_p,) * 4 + (c_int,)
    logprobs.restype = None
    scratch_bytes.argtypes, scratch_bytes.restype = (c_long,), c_long
    return _Functions(sample, logprobs, scratch_bytes)
