"""Reads the tensors of a GGUF model by the names and in the layout of a Hugging Face checkpoint.

An index, written by shared/gguf, says where each tensor is. Files are mapped, or read through staging.py. Tensors in a
block format are copied as bytes. A stored tensor of all experts of a layer is read as one tensor for each expert (see
stacked_tensors.py). This works with blocks, too: a row has only whole blocks, so every expert begins with a new block.
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from shared.gguf.index import Entry, read_index
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stacked_tensors import names_of_experts
from worker.model.checkpoint.staging import Extent, Staging
from worker.model.gguf.layout import AS_STORED, hugging_face_shape, layout_of
from worker.model.gguf.names import NOT_READ, hugging_face_name
from worker.model.gguf.tower_names import tower_name

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The tensors of a GGUF model. The files stay open until `close`."""

    def __init__(self, folder: Path, staging: Staging | None = None) -> None:
        """folder: a translated model; staging: reads the tensors, and is closed by close(); None: files are mapped

        Raises CheckpointError when a file is missing or too short.
        """
        index = read_index(folder)
        self._files = [folder / file for file in index.files]
        self._index = index
        self._entries: dict[str, Entry] = {}
        for name, entry in index.tensors.items():
            if tower := tower_name(name, index.projector):
                self._entries[tower] = entry
            elif not NOT_READ.fullmatch(name):
                self._entries |= _parts(hugging_face_name(name, index.architecture), entry)
        self._staging = staging
        self._fds: list[int] = []
        self._maps: list[Tensor] = []
        self._open = ExitStack()
        try:
            for number, path in enumerate(self._files):
                ends = (entry.offset + entry.nbytes for entry in index.tensors.values() if entry.file == number)
                self._add(path, max(ends, default=0))
            if staging is not None:
                self._open.callback(staging.close)  # this callback runs before the staged files are closed
        except BaseException:
            self._open.close()
            raise

    def _add(self, path: Path, needed: int) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, fd)
            if os.fstat(fd).st_size < needed:
                raise CheckpointError(f"{path} has become shorter since it was read; fetch it again")
            self._fds.append(fd)
            self._maps.append(torch.from_file(str(path), shared=False, size=needed, dtype=torch.uint8))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    @property
    def folder(self) -> Path:
        """The path of the first file, for error messages about the whole model."""
        return self._files[0]

    def names(self) -> list[str]:
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def where(self, name: str) -> Path:
        """Returns the file that holds a tensor, or the first file if no file holds it."""
        entry = self._entries.get(name)
        return self._files[entry.file if entry else 0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def format(self, name: str) -> str:
        """Returns the type of a tensor: F32, BF16, F16 or the name of a block format."""
        return self._entries[name].type

    def nbytes(self, name: str) -> int:
        return self._entries[name].nbytes

    def expect(self, names: Iterable[str]) -> None:
        """Announces which tensors copy() will be called with next, in this order, so that they can be read ahead."""
        if self._staging is not None:
            self._staging.expect(self._extent(self._entries[name]) for name in names)

    def copy(self, name: str, into: Tensor) -> None:
        """Copies a tensor into contiguous memory: numbers of any dtype, or for a block format the bytes of rows, uint8.

        Undoes the converter's changes, except the order of columns in a block format. Raises CheckpointError when the
        file cannot be read, or a decay is not negative.
        """
        entry, layout = self._entries[name], layout_of(name, into.shape[0] if into.dim() else 1, self._index)
        stored = DTYPES.get(entry.type, torch.uint8)
        if layout is AS_STORED:
            self._copy(entry, stored, into, name)
            return
        dtype = into.dtype if layout.undo is None else torch.float32
        read = torch.empty(into.shape, dtype=dtype, device=into.device)
        self._copy(entry, stored, read, name)
        into.copy_(layout.undone(read))

    def _copy(self, entry: Entry, stored: torch.dtype, into: Tensor, name: str) -> None:
        if self._staging is None:
            part = self._maps[entry.file][entry.offset : entry.offset + entry.nbytes]
            into.copy_(part.view(stored).view(into.shape))
            return
        try:
            self._staging.copy(self._extent(entry), stored, into)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self.where(name)}: tensor {name} cannot be read: {reason}") from error

    def _extent(self, entry: Entry) -> Extent:
        return Extent(self._fds[entry.file], entry.offset, entry.nbytes)

    def close(self) -> None:
        self._maps.clear()
        self._open.close()


def _parts(name: str, entry: Entry) -> dict[str, Entry]:
    """Returns the tensors that a stored tensor stands for: itself, or one tensor for each expert of a layer."""
    names = names_of_experts(name, entry.shape)
    nbytes = entry.nbytes // max(len(names), 1)
    parts = {
        one: replace(entry, shape=entry.shape[1:], offset=entry.offset + expert * nbytes, nbytes=nbytes)
        for expert, one in enumerate(names)
    }
    return parts or {name: replace(entry, shape=hugging_face_shape(name, entry.shape))}
