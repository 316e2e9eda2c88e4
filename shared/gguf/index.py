"""The index of a translated GGUF file: where its tensors lie. The worker reads them without the library `gguf`."""

from pathlib import Path

import msgspec

from shared.gguf.naming import INDEX


class Entry(msgspec.Struct, frozen=True):
    """A tensor. file: its number in Index.files. shape: rows first. offset, nbytes: in the file."""

    file: int
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Index(msgspec.Struct, frozen=True):
    """architecture: general.architecture. files: the paths of the GGUF files. head_dim: of the model."""

    architecture: str
    head_dim: int
    files: tuple[str, ...]
    tensors: dict[str, Entry]


def read_index(folder: Path) -> Index:
    return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
