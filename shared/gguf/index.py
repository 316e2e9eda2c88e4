"""The index of a translated GGUF file: where its tensors lie. The worker reads them without the library `gguf`."""

from pathlib import Path

import msgspec

from shared.gguf.naming import (
    INDEX,
    is_translation,
)


class Entry(msgspec.Struct, frozen=True):
    """A tensor. file: its index in Index.files. shape: rows first. offset, nbytes: its place in the file, in bytes."""

    file: int
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Index(msgspec.Struct, frozen=True):
    """architecture: general.architecture. files: the paths of the GGUF files, and the name of a file beside the index.

    head_dim, kv_heads: size and number of the model's K/V heads.
    tiled_heads: how the value heads of recurrent layers are stored, if not in the order of Hugging Face.
    projector: the kind of the vision tower among the files; empty: no tower. tower_heads: attention heads of the tower
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
    """The order of value heads in some files: first value head 0 of every key head, then value head 1 of these, …

    In Hugging Face's order, all value heads of key head 0 come first. per_key: value heads of one key head.
    value_dim: the size of a value head.
    """

    key_heads: int
    per_key: int
    value_dim: int


def stored_bytes(folder: Path) -> int:
    """Returns the bytes of the files of weights of a checkpoint, or of the GGUF files of a translated folder.

    Files that are not here do not count: a frontend on another host has only those of the tokenizer.
    """
    names = read_index(folder).files if is_translation(folder) else sorted(folder.glob("*.safetensors"))
    return sum(file.stat().st_size for name in names if (file := folder / name).is_file())


def read_index(folder: Path) -> Index:
    return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
