"""Reads GGUF adapters of llama.cpp: two matrices A and B, and a scale, for each changed tensor of the base model.

llama.cpp's convert_lora_to_gguf.py makes these files from PEFT folders. A tensor `blk.0.attn_q.weight` has the matrices
`….lora_a` and `….lora_b`. The scale of a product is adapter.lora.alpha / rank, or 1 without an alpha. This module reads
the header itself, because the library `gguf` loads numpy, which frontends must not load. Knows no Hugging Face names.
"""

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared.lora import AdapterError, AdapterFiles, LowRank, StoredFactor, check_apart

MAX_FIELDS, MAX_TENSORS, MAX_NAME_BYTES = 1000, 100_000, 1024
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# type number in the file → format of `struct`; texts and arrays have formats of their own
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9
# type number in the file → name, values in a block, bytes of a block
DTYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 8: ("Q8_0", 32, 34), 30: ("BF16", 1, 2)}
FACTOR = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<which>[ab])")


@dataclass(frozen=True, slots=True)
class GgufAdapter:
    """An adapter for models of `architecture` (llama.cpp's name). products: tensor name without `.weight` → product."""

    architecture: str
    products: dict[str, LowRank]


def read_gguf(files: AdapterFiles, max_rank: int = 0) -> GgufAdapter:
    """Reads a GGUF file. Raises AdapterError. max_rank: the highest rank that is accepted; 0: any"""
    try:
        fields, factors = _header(files.weights)
    except (struct.error, UnicodeDecodeError, OverflowError):  # OverflowError: an offset beyond any file
        raise AdapterError("the GGUF file is not complete") from None
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if fields.get(key) != wanted:
            raise AdapterError(f"the GGUF file has the {key} {str(fields.get(key))[:80]!r}; supported is {wanted!r}")
    if any(key.startswith("adapter.alora.") for key in fields):
        raise AdapterError("the GGUF file is an activated LoRA (adapter.alora), which is not supported")
    architecture, alpha = fields.get("general.architecture"), fields.get("adapter.lora.alpha", 0.0)
    if not isinstance(architecture, str):
        raise AdapterError("the GGUF file has no general.architecture")
    if not isinstance(alpha, float) or not 0 <= alpha < 1e9:
        raise AdapterError(f"the GGUF file has the adapter.lora.alpha {str(alpha)[:40]}, which is no positive number")
    pairs: dict[str, dict[str, StoredFactor]] = {}
    for name, factor in factors.items():
        matched = FACTOR.fullmatch(name)
        if matched is None:
            raise AdapterError(f"the GGUF file has the tensor {name!r}, which is not the A or B of a LoRA on a linear")
        pairs.setdefault(matched["module"], {})[matched["which"]] = factor
    if not pairs:
        raise AdapterError("the GGUF file has no tensors")
    return GgufAdapter(architecture, {name: _low_rank(name, pair, alpha, max_rank) for name, pair in pairs.items()})


def _low_rank(name: str, pair: dict[str, StoredFactor], alpha: float, max_rank: int) -> LowRank:
    if len(pair) < 2:
        raise AdapterError(f"the GGUF file has only one of lora_a and lora_b of {name}")
    a, b = pair["a"], pair["b"]
    if a.shape[0] != b.shape[1]:
        raise AdapterError(f"{name}: lora_a is {[*a.shape]} and lora_b {[*b.shape]}, whose ranks differ")
    if max_rank and a.shape[0] > max_rank:
        raise AdapterError(f"{name} has the rank {a.shape[0]}, above --max-lora-rank {max_rank}")
    return LowRank(a, b, alpha / a.shape[0] if alpha else 1.0)


def _header(content: bytes) -> tuple[dict[str, Any], dict[str, StoredFactor]]:
    """Returns the metadata without arrays, and the tensors. Checks that the file holds all bytes of the tensors."""
    magic, version, tensors, count = struct.unpack_from("<4sIQQ", content)
    if magic != b"GGUF" or version not in VERSIONS:
        raise AdapterError(f"the file is not GGUF of version {' or '.join(map(str, VERSIONS))}")
    if count > MAX_FIELDS or tensors > MAX_TENSORS:
        raise AdapterError(f"the GGUF file has more than {MAX_FIELDS} fields or {MAX_TENSORS} tensors")
    at, fields = 24, dict[str, Any]()
    for _ in range(count):
        key, at = _text(content, at, MAX_NAME_BYTES)
        (kind,) = struct.unpack_from("<I", content, at)
        fields[key], at = _value(content, at + 4, kind)
    entries = list(_entries(content, at, tensors))
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= 1 << 16:
        raise AdapterError("the GGUF file has a general.alignment that is not a number of bytes")
    end = entries[-1][-1] if entries else at
    begin = -(-end // alignment) * alignment
    found = {name: _factor(name, shape, kind, begin + offset, len(content)) for name, shape, kind, offset, _ in entries}
    if len(found) < len(entries):
        raise AdapterError("the GGUF file has two tensors of one name")
    check_apart(found, "the GGUF file")
    return fields, found


def _entries(content: bytes, at: int, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int, int]]:
    """Yields the name, shape (rows first), type and offset of each tensor, and the position behind its entry."""
    for _ in range(count):
        name, at = _text(content, at, MAX_NAME_BYTES)
        (dimensions,) = struct.unpack_from("<I", content, at)
        if dimensions > 4:
            raise AdapterError(f"the GGUF file has a tensor of {dimensions} dimensions: {name}")
        sizes = struct.unpack_from(f"<{dimensions}Q", content, at + 4)
        kind, offset = struct.unpack_from("<IQ", content, at + 4 + 8 * dimensions)
        at += 16 + 8 * dimensions
        yield name, sizes[::-1], kind, offset, at


def _factor(name: str, shape: tuple[int, ...], kind: int, begin: int, end: int) -> StoredFactor:
    if kind not in DTYPES:
        supported = ", ".join(dtype for dtype, *_ in DTYPES.values())
        raise AdapterError(f"the GGUF file has {name} in the type {kind}; supported are {supported}")
    dtype, block, size = DTYPES[kind]
    if len(shape) != 2 or not all(shape) or shape[1] % block:
        raise AdapterError(f"the GGUF file has {name} of the shape {[*shape]}, which is not that of a LoRA on a linear")
    last = begin + math.prod(shape) // block * size
    if last > end:
        raise AdapterError("the GGUF file is not complete")
    return StoredFactor(dtype, (shape[0], shape[1]), begin, last)


def _text(content: bytes, at: int, most: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", content, at)
    end = at + 8 + length
    if end > len(content) or length > most:
        raise AdapterError("the GGUF file is not complete, or has a name that is too long")
    return content[at + 8 : end].decode(), end


def _value(content: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Returns a value of the metadata (None for an array) and the position behind it."""
    if kind == TEXT:
        return _text(content, at, len(content))
    if kind != ARRAY:
        (value,) = struct.unpack_from(_scalar(kind), content, at)
        return value, at + struct.calcsize(_scalar(kind))
    kind, count = struct.unpack_from("<IQ", content, at)
    at += 12
    if kind != TEXT:
        return None, at + count * struct.calcsize(_scalar(kind))
    for _ in range(count):  # an entry takes at least 8 bytes, so the length of the file bounds the loop
        _, at = _text(content, at, len(content))
    return None, at


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise AdapterError(f"the GGUF file has a field of the type {kind}, which adapters do not have")
    return SCALARS[kind]
