"""Makes tensors from the sampling parameters that a test writes as Python values."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from worker.ops.sampling.reference import Bias, History, PlainParams, SampleParams, Stages

Record = TypeVar("Record")


@dataclass(frozen=True)
class Row:
    """The sampling parameters of one request, on the host."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    position: int = 0
    history: tuple[tuple[int, int], ...] = ()  # (token, how often in the output)
    bias: tuple[tuple[int, float], ...] = ()


def params_of(rows: list[Row]) -> SampleParams:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    plain = {n: column(n, torch.float32) for n in ("temperature", "top_p", "min_p")}
    top_k, positions = column("top_k", torch.int64), column("position", torch.int64)
    seeds = torch.tensor([row.seed - (row.seed >> 63 << 64) for row in rows])
    seen = [(r, token, count) for r, row in enumerate(rows) for token, count in row.history]
    biased = [(r, token, value) for r, row in enumerate(rows) for token, value in row.bias]
    return SampleParams(
        PlainParams(**plain, top_k=top_k, seeds=seeds, positions=positions),
        **{n: column(n, torch.float32) for n in PENALTIES},
        history=History(*torch.tensor(seen).T.contiguous()) if seen else None,
        bias=bias_of(biased) if biased else None,
        stages=Stages(
            all_greedy=all(row.temperature == 0 for row in rows),
            any_greedy=any(row.temperature == 0 for row in rows),
            any_top_k=any(row.top_k for row in rows),
            any_top_p=any(row.top_p < 1 for row in rows),
            any_min_p=any(row.min_p for row in rows),
        ),
    )


PENALTIES = ("repetition", "presence", "frequency")


def bias_of(entries: list[tuple[int, int, float]]) -> Bias:
    rows, ids, values = zip(*entries, strict=True)
    return Bias(torch.tensor(rows), torch.tensor(ids), torch.tensor(values))


def moved_to(record: Record, device: str) -> Record:
    """Returns the dataclass with its tensors, and those of dataclasses in it, moved to the device."""
    values = ((f.name, getattr(record, f.name)) for f in fields(record))
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else moved_to(value, device)
        for name, value in values
        if isinstance(value, Tensor) or is_dataclass(value)
    }
    return replace(record, **moved)
