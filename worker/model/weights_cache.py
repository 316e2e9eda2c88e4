"""Keeps the packed weights of a model on disk, so that the next start reads them and packs nothing.

A folder has one file (tensor_file.py) for each checkpoint, dtype, quantization and layout in memory. The file also
says which checkpoint it was made from: the config, and the sizes and times of the files of weights. If these differ, or
the file is damaged, it is not used and is written again. A failure to write it is logged, and the model is served.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.hf_hub import Progress
from worker.kernels.cpu.packed_experts import Record, from_records
from worker.kernels.cpu.packed_weight import LAYOUT, NUMBERS, TENSORS, CpuWeight, PackedPart, layout
from worker.kernels.delta_net import DeltaNetWeights
from worker.kernels.experts import Experts, PackedExperts
from worker.kernels.experts import packed_in_c as experts_in_c
from worker.kernels.linear import PackedLinear, packed_in_c
from worker.model import tensor_file
from worker.model.checkpoint import CheckpointError, read_config, weight_files
from worker.model.decoder import Layer, Weights
from worker.model.layer_inputs import LayerInputs
from worker.model.quantization.in_memory import InMemory
from worker.model.tensor_file import BrokenFile

log = logging.getLogger("sluice.load")

EMBED, NORM, HEAD = "embed", "norm", "head"
PARTS = {"experts": Experts, "delta": DeltaNetWeights}  # fields of Layer with fields of their own
COUNTER = "loads"  # a field of Experts that is not a weight
INPUTS, INPUTS_FIELDS = "layer_inputs", tuple(field.name for field in dataclasses.fields(LayerInputs))
LAYER_FIELDS = tuple(field.name for field in dataclasses.fields(Layer))


@dataclass(frozen=True, slots=True)
class WeightsCache:
    """The place of one model's packed weights. key: what they are made from; another key means other weights."""

    path: Path
    key: str

    @classmethod
    def of(cls, directory: Path, folder: Path, dtype: torch.dtype, memory: InMemory) -> "WeightsCache":
        """folder: of the checkpoint; memory: how its linears are kept. Raises CheckpointError if a file is missing."""
        files = weight_files(folder)
        if missing := [file for file in files if not file.exists()]:
            raise CheckpointError(f"{missing[0]} is missing")
        name = _digest([str(file.resolve()) for file in files], str(dtype), repr(memory), layout(dtype))[:16]
        stats = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = _digest(LAYOUT, name, stats, read_config(folder))
        return cls(directory / f"{files[0].stem}-{name}.safetensors", key)

    def read(self, on_progress: Progress = lambda done, total: None) -> Weights | None:
        """Returns the weights; None if they are not there, or not usable, which is logged."""
        begun = time.perf_counter()
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("packed weights cannot be read: %s: %s", self.path, error.strerror)
            return None
        try:
            weights = self._read(fd, on_progress)
        except (BrokenFile, OSError) as error:
            log.warning("packed weights in %s are not used, but made again: %s", self.path, error)
            return None
        finally:
            os.close(fd)
        log.info("packed weights were read from %s in %.1f s", self.path, time.perf_counter() - begun)
        return weights

    def _read(self, fd: int, on_progress: Progress) -> Weights:
        header = tensor_file.read_header(fd)
        if not isinstance(header.facts, dict) or header.facts.get("key") != self.key:
            raise BrokenFile("the checkpoint has changed since, or another version wrote the file")
        return _assembled(header.facts, tensor_file.read_tensors(fd, header, on_progress))

    def write(self, weights: Weights, on_progress: Progress = lambda done, total: None) -> None:
        """Writes the weights, which must be packed for the C library. A failure is logged."""
        begun = time.perf_counter()
        tensors, structure = _taken_apart(weights)
        facts = {"key": self.key, "dtype": tensor_file.NAMES[weights.embed.dtype], **structure}
        try:
            tensor_file.write(self.path, tensors, facts, on_progress)
        except OSError as error:
            log.warning("packed weights cannot be written: %s: %s", self.path, error.strerror)
            return
        size = sum(tensor.nbytes for tensor in tensors.values())
        took = time.perf_counter() - begun
        log.info("packed weights (%.1f GB) were written to %s in %.1f s", size / 1e9, self.path, took)


def _digest(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


Packed = Tensor | PackedLinear | PackedExperts


def _taken_apart(weights: Weights) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Returns all tensors by name, and the numbers that describe linears and experts: those of their C structs."""
    tensors: dict[str, Tensor] = {}
    linears: dict[str, list[dict[str, Any]]] = {}
    experts: dict[str, list[Record]] = {}
    for name, value in _fields(weights):
        if isinstance(value, PackedLinear):
            assert value.cpu is not None
            linears[name] = [{number: getattr(part, number) for number in NUMBERS} for part in value.cpu.parts]
            for index, part in enumerate(value.cpu.parts):
                tensors |= {f"{name}.{index}.{kind}": tensor for kind, tensor in part.tensors.items()}
        elif isinstance(value, PackedExperts):
            assert value.cpu is not None
            experts[name] = value.cpu.records
            tensors |= {f"{name}.{index}": piece for index, piece in enumerate(value.cpu.pieces)}
        else:
            tensors[name] = value
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return contiguous, {"linears": linears, "experts": experts}


def _fields(weights: Weights) -> Iterator[tuple[str, Packed]]:
    yield from ((EMBED, weights.embed), (NORM, weights.norm), (HEAD, weights.head))
    if weights.layer_inputs is not None:
        yield from ((f"{INPUTS}.{part}", getattr(weights.layer_inputs, part)) for part in INPUTS_FIELDS)
    for index, layer in enumerate(weights.layers):
        for name in LAYER_FIELDS:
            value = getattr(layer, name)
            if value is not None and name in PARTS:
                parts = {part: getattr(value, part) for part in _parts_of(name)}
                yield from ((f"layers.{index}.{name}.{part}", x) for part, x in parts.items() if x is not None)
            elif value is not None:
                yield f"layers.{index}.{name}", value


def _parts_of(field: str) -> list[str]:
    """Returns the fields of a field of Layer, without counters."""
    return [part.name for part in dataclasses.fields(PARTS[field]) if part.name != COUNTER]


def _assembled(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Weights:
    """Returns the weights that _taken_apart took apart."""
    dtype = tensor_file.DTYPES[facts["dtype"]]
    found: dict[str, Any] = dict(tensors)
    for name, parts in facts["linears"].items():
        packed = tuple(_part(f"{name}.{index}.", one, tensors) for index, one in enumerate(parts))
        found[name] = packed_in_c(CpuWeight(packed, dtype))
    for name, records in facts["experts"].items():
        pieces = [tensors[piece] for piece in takewhile(tensors.__contains__, (f"{name}.{i}" for i in count()))]
        found[name] = experts_in_c(from_records(pieces, records, dtype))
    layers: list[Layer] = []
    while f"layers.{len(layers)}.o" in found:
        prefix = f"layers.{len(layers)}."
        fields: dict[str, Any] = {name: found.get(prefix + name) for name in LAYER_FIELDS}
        for name, kind in PARTS.items():
            parts = {part: found.get(f"{prefix}{name}.{part}") for part in _parts_of(name)}
            if any(value is not None for value in parts.values()):
                fields[name] = kind(**parts)
        layers.append(Layer(**fields))
    inputs = {part: found.get(f"{INPUTS}.{part}") for part in INPUTS_FIELDS}
    shared: Any = None if inputs["table"] is None else LayerInputs(**inputs)  # type: ignore[arg-type]  # all are there
    return Weights(found[EMBED], layers, found[NORM], found[HEAD], shared)


def _part(prefix: str, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> PackedPart:
    own: dict[str, Any] = {name: tensors[prefix + name] for name in TENSORS if prefix + name in tensors}
    return PackedPart(**own, **numbers)
