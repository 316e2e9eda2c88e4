"""Keeps the packed weights of a model on disk, so that the next start reads them and packs nothing.

A folder has one file for each checkpoint, dtype, quantization and layout in memory. If several
processes compute the model, each process has a file for its part. The file also says from which checkpoint it was made:
the config, and the sizes and times of the weight files. If these differ, or if the file is damaged, it is not used but
written again. A failure to write is logged, and the model is served anyway.
"""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count, takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor

from shared.hf_hub import Progress
from worker.checkpoint.checkpoint import CheckpointError, read_config, weight_files
from worker.models.decoder import Layer, Weights
from worker.models.layer_kinds import feed_forward, mixer
from worker.models.per_layer_embeddings import PerLayerInputs
from worker.models.sharding import Part
from worker.ops.embedding import Embedding
from worker.ops.linear.native import LAYOUT, NUMBERS, TENSORS, CpuWeight, PackedPart, layout
from worker.ops.linear.packed import PackedLinear, packed_in_c
from worker.ops.moe.native import Record, from_records
from worker.ops.moe.packed import PackedExperts
from worker.ops.moe.packed import packed_in_c as experts_in_c
from worker.ops.native import Pieces
from worker.quantization.methods import InMemory, block_format

log = logging.getLogger("sluice.load")
EMBED, NORM, HEAD, LAYERS, INPUTS = "embed", "norm", "head", "layers", "layer_inputs"
COUNTER = "loads"  # a field of Experts that is not a weight
NO_RECORDS: Mapping[str, type] = {}
STRUCTURE = 3  # to be raised whenever the names of tensors in a file change
PACKED = (Tensor, PackedLinear, PackedExperts, Embedding)
Packed = Tensor | PackedLinear | PackedExperts | Embedding


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
        header = read_header(fd)
        if not isinstance(header.facts, dict) or header.facts.get("key") != self.key:
            raise BrokenFile("the checkpoint has changed since, or another version wrote the file")
        return _assembled(header.facts, read_tensors(fd, header, on_progress))

    def write(self, weights: Weights, on_progress: Progress = lambda done, total: None) -> None:
        """Writes the weights, which must be packed for the C library. A failure is logged."""
        begun = time.perf_counter()
        tensors, structure = _taken_apart(weights)
        facts = {"key": self.key, "dtype": NAMES[weights.embed.dtype], **structure}
        try:
            write(self.path, tensors, facts, on_progress)
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

    The structure is the kinds of the layers, the formats of embeddings, and the numbers in the C structs of linears and
    experts.
    """
    tensors: dict[str, Tensor] = {}
    linears: dict[str, list[dict[str, Any]]] = {}
    experts: dict[str, list[Record]] = {}
    # the dtype of the rows; the block format or ""; the name of the linear that has the codes or ""
    embeddings: dict[str, list[str]] = {}
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
        elif isinstance(value, Embedding):
            embeddings[name] = [
                NAMES[value.dtype],
                "" if value.blocks is None else value.blocks.name,
                "" if value.head is None else HEAD,
            ]
            tensors[name] = value.stored
        else:
            tensors[name] = value
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    kinds = [(layer.mixer.kind, layer.feed_forward.kind) for layer in weights.layers]
    return contiguous, {"linears": linears, "experts": experts, "embeddings": embeddings, "kinds": kinds}


def _fields(weights: Weights) -> Iterator[tuple[str, Packed]]:
    yield from ((EMBED, weights.embed), (NORM, weights.norm), (HEAD, weights.head))
    yield from _fields_of(INPUTS, weights.per_layer_inputs)
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
    dtype = DTYPES[facts["dtype"]]
    found: dict[str, Any] = dict(tensors)
    for name, parts in facts["linears"].items():
        packed = tuple(_part(f"{name}.{index}.", one, tensors) for index, one in enumerate(parts))
        found[name] = packed_in_c(CpuWeight(packed, dtype))
    for name, records in facts["experts"].items():
        pieces = [tensors[piece] for piece in takewhile(tensors.__contains__, (f"{name}.{i}" for i in count()))]
        found[name] = experts_in_c(from_records(pieces, records, dtype))
    for name, (of_rows, blocks, packed) in facts["embeddings"].items():
        head = found[packed].cpu if packed else None
        found[name] = Embedding(tensors[name], DTYPES[of_rows], block_format(blocks) if blocks else None, head)
    groups = {name[:at] for name in found for at in range(len(name)) if name[at] == "."}
    layers = []
    for index, (mixed, fed) in enumerate(facts["kinds"]):
        records = {"mixer": mixer(mixed).stored.weights, "feed_forward": feed_forward(fed).stored.weights}
        layers.append(_made(Layer, f"{LAYERS}.{index}", found, groups, records))
    inputs = _made(PerLayerInputs, INPUTS, found, groups) if INPUTS in groups else None
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
        elif own in groups or field.name in records:  # a feed-forward may have no weights
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


# Writes many tensors to one safetensors file, and reads them back into huge pages at the speed of the disk.
#
# The file's metadata holds facts about the tensors (any JSON), and a checksum of the facts, the tensors and their
# offsets. Several threads read pieces directly into the tensors. Files are not mapped, because an operating system
# may evict idle mapped pages.

PIECE_BYTES = 8 << 20  # a piece is read and then summed while it is still in the CPU's cache
THREADS = 8  # concurrent reads; with fewer, a fast disk would be idle at times
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA, FACTS, CHECKSUM = "__metadata__", "facts", "checksum"
LARGEST_HEADER = 64 << 20  # bytes
UNFINISHED = ".unfinished"  # the file name's suffix while the file is written
ABANDONED_S = 3600.0  # an unfinished file of this age belongs to a process that has died


class BrokenFile(ValueError):
    """The file was not written by this module, or is incomplete. The message says why, without the file's name."""


@dataclass(frozen=True, slots=True)
class Header:
    """A file's header. entries: {name: {"dtype", "shape", "data_offsets"}}; begin: the file offset of the tensors"""

    facts: Any
    entries: dict[str, dict[str, Any]]
    checksum: str
    begin: int

    @property
    def nbytes(self) -> int:
        return max((int(entry["data_offsets"][1]) for entry in self.entries.values()), default=0)


def write(path: Path, tensors: Mapping[str, Tensor], facts: Any, on_progress: Progress) -> None:
    """Writes contiguous CPU tensors to a file with another name, then renames it, so that `path` is always complete.

    Raises OSError when the folder cannot be written or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    pieces = [*_pieces(tensors.values())]
    with ThreadPoolExecutor(THREADS, "weights") as pool:
        checksum = _checksum(facts, entries, pool.map(_sum, pieces))
        header = json.dumps({METADATA: {FACTS: json.dumps(facts), CHECKSUM: checksum}, **entries}).encode()
        header += b" " * (-len(header) % 8)
        handle, unfinished = tempfile.mkstemp(UNFINISHED, f"{path.name}.", path.parent)
        try:
            with open(handle, "wb", buffering=0) as file:
                begin = _write_all(file.fileno(), memoryview(len(header).to_bytes(8, "little") + header), 0)
                places = _places(pieces, begin)
                for done in pool.map(partial(_write_all, file.fileno()), pieces, places):
                    on_progress(done - begin, end)
            os.replace(unfinished, path)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            with suppress(OSError):
                os.unlink(unfinished)
            raise


def read_header(fd: int) -> Header:
    """Reads the header. Raises OSError, and BrokenFile if the file is incomplete or not written by this module."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(size - 8, LARGEST_HEADER):
        raise BrokenFile("it has no complete header")
    try:
        entries = json.loads(os.pread(fd, length, 8))
        metadata = entries.pop(METADATA)
        header = Header(json.loads(metadata[FACTS]), entries, str(metadata[CHECKSUM]), 8 + length)
        _check_places(header, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenFile(f"its header is damaged ({error})") from error
    return header


def _check_places(header: Header, size: int) -> None:
    end = 0
    for entry in header.entries.values():
        begin, end_before, end = entry["data_offsets"][0], end, entry["data_offsets"][1]
        nbytes = torch.Size(entry["shape"]).numel() * DTYPES[entry["dtype"]].itemsize
        if begin != end_before or end - begin != nbytes:
            raise ValueError("a tensor's place does not fit its shape")
    if header.begin + end != size:
        raise ValueError(f"it has {size} bytes instead of {header.begin + end}")


def read_tensors(fd: int, header: Header, on_progress: Progress) -> dict[str, Tensor]:
    """Reads all tensors into memory. Raises OSError, and BrokenFile if the file is damaged."""
    memory = Pieces()
    tensors = {
        name: memory.take(tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in header.entries.items()
    }
    pieces, done, sums = [*_pieces(tensors.values())], 0, []
    on_progress(0, header.nbytes)
    with ThreadPoolExecutor(THREADS, "weights") as pool:
        for piece, one in zip(pieces, pool.map(partial(_read, fd), pieces, _places(pieces, header.begin)), strict=True):
            done += len(piece)
            sums.append(one)
            on_progress(done, header.nbytes)
    if _checksum(header.facts, header.entries, sums) != header.checksum:
        raise BrokenFile("its checksum is wrong")
    return tensors


def _pieces(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        memory = tensor.view(-1).view(torch.uint8).numpy().data
        yield from (memory[begin : begin + PIECE_BYTES] for begin in range(0, len(memory), PIECE_BYTES))


def _places(pieces: Sequence[memoryview], begin: int) -> list[int]:
    """Returns where each piece begins in the file."""
    return [*accumulate(map(len, pieces), initial=begin)][:-1]


def _read(fd: int, piece: memoryview, offset: int) -> int:
    """Fills the piece from the file and returns the sum of its bytes (see _sum)."""
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], offset + done)
        if not count:
            raise BrokenFile("it ends early")
        done += count
    return _sum(piece)


def _write_all(fd: int, piece: memoryview, offset: int) -> int:
    """Writes the piece and returns where it ends in the file."""
    while piece:
        written = os.pwrite(fd, piece, offset)
        piece, offset = piece[written:], offset + written
    return offset


def _sum(piece: memoryview) -> int:
    """Returns the sum of the 64-bit words and of the remaining bytes, modulo 2^64. It runs at the speed of memory."""
    words = len(piece) // 8 * 8
    return int(np.frombuffer(piece[:words], np.uint64).sum(dtype=np.uint64)) + sum(piece[words:]) & (1 << 64) - 1


def _checksum(facts: Any, entries: Mapping[str, Any], sums: Iterable[int]) -> str:
    return hashlib.sha256(json.dumps([facts, entries, [*sums]], sort_keys=True).encode()).hexdigest()


def _remove_abandoned(path: Path) -> None:
    """Removes old unfinished files. Their age is measured against a new file's time, by the file system's own clock."""
    with tempfile.TemporaryFile(dir=path.parent) as new:
        now = os.fstat(new.fileno()).st_mtime
    for other in path.parent.glob(f"*{UNFINISHED}"):
        with suppress(OSError):
            if now - other.stat().st_mtime > ABANDONED_S:
                other.unlink()
