"""The index of a translated GGUF file: where its tensors lie. The worker reads them without the library `gguf`.

Apart from translated.py, because msgspec is imported here, which the command line does without.
"""

from math import prod
from pathlib import Path
from typing import Any

import msgspec

from shared.gguf.naming import INDEX, is_translation


class Entry(msgspec.Struct, frozen=True):
    """A tensor. file: its index in Index.files. shape: rows first. offset, nbytes: its place in the file, in bytes."""

    file: int
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Index(msgspec.Struct, frozen=True):
    """architecture: general.architecture. files: the paths of the GGUF files, and the name of a file next to the index.

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


class StoredWeights(msgspec.Struct, frozen=True):
    """What a checkpoint's files say about its weights. "" and 0: the files do not say it, or are not here.

    format: "gguf" or "safetensors". family: of models, such as "llama". kind: of numbers, such as "Q4_K_M" or "BF16"
    """

    format: str = ""
    family: str = ""
    parameters: int = 0
    kind: str = ""


class _Config(msgspec.Struct):
    """The fields of config.json that are read here. dtype: `torch_dtype` in older files"""

    model_type: str = ""
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


MOST_HEADER_BYTES = 100_000_000  # of a safetensors file, as in its own library
KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def stored_weights(folder: Path) -> StoredWeights:
    """Reads the index or the headers of a checkpoint's files of weights. Raises OSError or msgspec.DecodeError."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
    quantization = config.quantization_config or {}
    if is_translation(folder):
        index = read_index(folder)
        count = sum(prod(entry.shape) for entry in index.tensors.values())
        return StoredWeights("gguf", index.architecture, count, str(quantization.get("kind", "")))
    files = sorted(folder.glob("*.safetensors"))
    dtype = config.dtype or config.torch_dtype or ""
    kind = str(quantization.get("quant_method", "")).upper() or KINDS.get(dtype, dtype)
    # A packed tensor has fewer numbers than the model has parameters.
    count = 0 if quantization else sum(map(_numbers_in, files))
    return StoredWeights("safetensors" if files else "", config.model_type, count, kind)


def _numbers_in(file: Path) -> int:
    """Returns how many numbers the tensors of a safetensors file have: its header is JSON, after its length."""
    with file.open("rb") as stream:
        header = stream.read(min(int.from_bytes(stream.read(8), "little"), MOST_HEADER_BYTES))
    tensors = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
    return sum(prod(one["shape"]) for name, one in tensors.items() if name != "__metadata__")


def read_index(folder: Path) -> Index:
    return msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
