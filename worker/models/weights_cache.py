"""Keeps the packed weights of a model on disk, so that the next start reads them and packs nothing.

A folder has one file (tensor_file.py) for each checkpoint, dtype, quantization and layout in memory. If several
processes compute the model, each process has a file for its part. The file also says from which checkpoint it was made:
the config, and the sizes and times of the weight files. If these differ, or if the file is damaged, it is not used but
written again. A failure to write is logged, and the model is served anyway.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from shared.hf_hub import Progress
from worker.kernels.cpu.packed_experts import Record, from_records
from worker.kernels.cpu.packed_weight import LAYOUT, NUMBERS, TENSORS, CpuWeight, PackedPart, layout
from worker.kernels.experts import PackedExperts
from worker.kernels.experts import packed_in_c as experts_in_c
from worker.kernels.linear import PackedLinear, packed_in_c
from worker.model.checkpoint.checkpoint import CheckpointError, read_config, weight_files
from worker.model.feed_forward.kinds import feed_forward
from worker.model.layer import Layer, Weights
from worker.model.layer_inputs import LayerInputs
from worker.model.mixers.kinds import mixer
from worker.model.parts.part import Part
from worker.model.quantization.in_memory import InMemory
from worker.model.weights_cache import tensor_file
from worker.model.weights_cache.tensor_file import BrokenFile

log = logging.getLogger("sluice.load")

EMBED, NORM, HEAD, LAYERS, INPUTS = "embed", "norm", "head", "layers", "layer_inputs"
COUNTER = "loads"  # a field of Experts that is not a weight
NO_RECORDS: Mapping[str, type] = {}
STRUCTURE = 2  # to be raised whenever the names of tensors in a file change
PACKED = (Tensor, PackedLinear, PackedExperts)
Packed = Tensor | PackedLinear | PackedExperts


@dataclass(frozen=True, slots=True)
class WeightsCache:
    """The file of one model's packed weights.

    key: a hash of everything from which the weights are made. A file with another key is not used.
    """

    path: Path
    key: str

    @classmethod
    def of(
        cls, directory: Path, folder: Path, dtype: torch.dtype, memory: InMemory, part: Part | None = None
    ) -> "WeightsCache":
        """directory: the cache's folder; folder: the checkpoint; memory: how linears are kept in memory
        part: the part of the model that this process has; None if it has the whole model

        Raises CheckpointError if a weight file is missing.
        """
        files = weight_files(folder)
        if missing := [file for file in files if not file.exists()]:
            raise CheckpointError(f"{missing[0]} is missing")
        of_part = () if part is None else (repr(part),)
        name = _digest([str(file.resolve()) for file in files], str(dtype), repr(memory), layout(dtype), *of_part)[:16]
        stats = [(file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = _digest(LAYOUT, STRUCTURE, name, stats, read_config(folder))
        return cls(directory / f"{files[0].stem}-{name}.safetensors", key)

    def read(self, on_progress: Progress = lambda done, total: None) -> Weights | None:
        """Returns the weights. Returns None if there is no file, or if the file is not usable, which is logged."""
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


def _taken_apart(weights: Weights) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns all tensors by name, and the structure of the weights.

    The structure is the kinds of the layers, and the numbers in the C structs of linears and experts.
    """
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
    kinds = [(layer.mixer.kind, layer.feed_forward.kind) for layer in weights.layers]
    return contiguous, {"linears": linears, "experts": experts, "kinds": kinds}


def _fields(weights: Weights) -> Iterator[tuple[str, Packed]]:
    yield from ((EMBED, weights.embed), (NORM, weights.norm), (HEAD, weights.head))
    yield from _fields_of(INPUTS, weights.layer_inputs)
    for index, layer in enumerate(weights.layers):
        yield from _fields_of(f"{LAYERS}.{index}", layer)


def _fields_of(name: str, value: Any) -> Iterator[tuple[str, Packed]]:
    """Yields a packed value with its name, or all packed values in the fields of a record except counters."""
    if isinstance(value, PACKED):
        yield name, value
    elif value is not None:
        for field in dataclasses.fields(value):
            if field.name != COUNTER:
                yield from _fields_of(f"{name}.{field.name}", getattr(value, field.name))


def _assembled(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Weights:
    """Puts together the weights that _taken_apart took apart."""
    dtype = tensor_file.DTYPES[facts["dtype"]]
    found: dict[str, Any] = dict(tensors)
    for name, parts in facts["linears"].items():
        packed = tuple(_part(f"{name}.{index}.", one, tensors) for index, one in enumerate(parts))
        found[name] = packed_in_c(CpuWeight(packed, dtype))
    for name, records in facts["experts"].items():
        pieces = [tensors[piece] for piece in takewhile(tensors.__contains__, (f"{name}.{i}" for i in count()))]
        found[name] = experts_in_c(from_records(pieces, records, dtype))
    groups = {name[:at] for name in found for at in range(len(name)) if name[at] == "."}
    layers = []
    for index, (mixed, fed) in enumerate(facts["kinds"]):
        records = {"mixer": mixer(mixed).stored.weights, "feed_forward": feed_forward(fed).stored.weights}
        layers.append(_made(Layer, f"{LAYERS}.{index}", found, groups, records))
    inputs = _made(LayerInputs, INPUTS, found, groups) if INPUTS in groups else None
    return Weights(found[EMBED], layers, found[NORM], found[HEAD], inputs)


def _made(
    record: type, name: str, found: Mapping[str, Any], groups: Set[str], records: Mapping[str, type] = NO_RECORDS
) -> Any:
    """Makes a record. Its fields are in `found` under the record's name, a dot and the field's name.

    groups: the names of all records with fields in `found`
    records: the record types of fields, by field name, where the field's type hint does not tell them
    """
    hints, fields = get_type_hints(record), dict[str, Any]()
    for field in dataclasses.fields(record):
        own = f"{name}.{field.name}"
        if own in found:
            fields[field.name] = found[own]
        elif own in groups:
            kind = records.get(field.name) or _record_of(hints[field.name])
            fields[field.name] = _made(kind, own, found, groups)
    return record(**fields)


def _record_of(hint: Any) -> type:
    """Returns the dataclass among the types that a field may have."""
    kinds: tuple[type, ...] = get_args(hint) or (hint,)
    return next(kind for kind in kinds if dataclasses.is_dataclass(kind))


def _part(prefix: str, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> PackedPart:
    own: dict[str, Any] = {name: tensors[prefix + name] for name in TENSORS if prefix + name in tensors}
    return PackedPart(**own, **numbers)
