"""How many rows chose each expert, counted by the stages of a model on one machine (--expert-metrics).

The counts of all layers are in memory that all stages map. Each stage counts the rows of its own layers, and rank 0
reads all counts. Ranks that share a layer would count the same rows, so only the first of them counts.
"""

import mmap
import os

import torch
from torch import Tensor

from worker.model.parts.part import Part
from worker.spec import ModelSpec

ITEM = 8  # bytes of a count


def make_loads(spec: ModelSpec) -> int:
    """Returns a file descriptor of memory for the counts of a model, all zero. spec: of the whole model"""
    memory = os.memfd_create("sluice-experts", os.MFD_CLOEXEC)
    os.ftruncate(memory, max(1, len(spec.layers) * _experts(spec)) * ITEM)
    return memory


def map_loads(memory: int, spec: ModelSpec) -> Tensor:
    """Returns the counts [layers, experts] int64 of the whole model, which other processes read and write, too."""
    shape = len(spec.layers), _experts(spec)
    return torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.int64)[: shape[0] * shape[1]].view(shape)


def own_loads(memory: int, spec: ModelSpec, part: Part) -> Tensor | None:
    """Returns the counts of the layers of a part; None if another rank counts them. spec: of the whole model"""
    if memory < 0 or part.lane:
        return None
    return map_loads(memory, spec)[part.stage.first : part.stage.end]


def _experts(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.experts.count
