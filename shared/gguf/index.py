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
    """architecture: general.architecture. files: the paths of the GGUF files, and the name of a file beside the index.

    head_dim, kv_heads: of the model.
    tiled_heads: how the value heads of recurrent layers are stored, if not in the order of Hugging Face.
    projector: the kind of the vision tower among the files; empty: there is none. tower_heads: of its attention
    """

    architecture: str
    head_dim: int
    kv_heads: int
    files: tuple[str, ...]
    tensors: dict[str, Entry]
    tiled_heads: "TiledHeads | None" = None
    projector: str = ""
    tower_heads: int = 0


class TiledHeads(msgspec.Struct, frozen=True):
    """The order of value heads in some files: the first value head of every key head, then the second of every one, …

    Hugging Face has all value heads of the first key head first. per_key: value heads of one key head.
    value_dim: the size of a value head.
    """

    key_heads: int
    per_key: int
    value_dim: int


def read_index(folder: Path) -> Index:
    return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
