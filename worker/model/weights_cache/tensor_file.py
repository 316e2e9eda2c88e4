"""Writes many tensors to one safetensors file, and reads them back into huge pages at the speed of the disk.

The file's metadata holds facts about the tensors (any JSON), and a checksum of the facts, the tensors and their
offsets. Several threads read pieces directly into the tensors. Files are not mapped, because an operating system may
evict idle mapped pages.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.hf_hub import Progress
from worker.kernels.cpu.huge_pages import Pieces

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
