"""Reads a GGUF file, or the split files of one model: metadata as Python values, and where each tensor lies.

The library `gguf` reads the container. This module checks what the library does not: that the file is long enough, and
that split files belong together. Texts that are not UTF-8 are read with U+FFFD for each wrong byte, and a warning; only
the texts of a tokenizer's lists must be right, because wrong ones would be other tokens.
"""

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from shared.gguf.naming import MAGIC, GgufError
from shared.log import on_one_line

log = logging.getLogger("sluice.gguf")

SPLIT_COUNT = "split.count"
TOKENIZER_LISTS = "tokenizer."  # how the names of a tokenizer's lists begin
UNDECODED = "surrogateescape"  # how bytes that are not UTF-8 are kept until it is known what they are for
KNOWN_TYPES = frozenset(GGMLQuantizationType)
# Types that only the fork ik_llama.cpp writes, by their numbers. The types with interleaved rows (…_R4, …_R8) follow.
IK_TYPES = {
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K",
    141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 147: "Q8_K16", 148: "Q8_K32", 149: "Q8_KR8",
    150: "Q8_K128", 151: "Q8_KV", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS",
    157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
AXES_PART, TYPE_PART = 3, 4  # which parts of a tensor's entry are its sizes and its type
MAX_NAME = 80  # how many characters of a name are repeated
MAX_REASON = 300  # how many characters of the library's message about a file, which may repeat its names, are repeated
WIDEST = 4  # bytes of the largest number in a tensor; tensors begin at multiples of WIDEST
# Bounds of a header, several times those of real models, because it becomes Python values of many times its size: a
# client may have uploaded the file, and the launcher and all frontends read it.
MOST_TENSORS = 32_768
MOST_KEYS = 8_192
MOST_ENTRIES = 4 << 20  # of all lists together; a vocabulary of 262,144 tokens has 1.3 million, with its merges
MOST_HEADER_BYTES = 256 << 20
MOST_AXES = 4  # of a tensor, as in llama.cpp


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file. shape: rows first, as PyTorch has it. offset: its first byte in the file."""

    file: Path
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def floats(self) -> list[float]:
        """Reads a small tensor of type F32."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return list(struct.unpack(f"<{self.nbytes // 4}f", file.read(self.nbytes)))


@dataclass(frozen=True, slots=True)
class Container:
    """The contents of a model's files."""

    name: str  # the name of the first file, for messages
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, files: Sequence[Path]) -> "Container":
        """Reads all files of one model, given in the order of their numbers. Raises GgufError."""
        metadata, tensors = _read(files[0])
        if (count := cls(files[0].name, metadata, tensors).integer(SPLIT_COUNT, 1)) not in (0, len(files)):
            raise GgufError(f"{files[0]} is one of {count} files, but {len(files)} are there")
        for file in files[1:]:
            more, part = _read(file)
            if more.get(SPLIT_COUNT) != len(files) or tensors.keys() & part.keys():
                raise GgufError(f"{file} does not belong to {files[0]}")
            tensors |= part
        return cls(files[0].name, metadata, tensors)

    @classmethod
    def read_first(cls, file: Path) -> "Container":
        """Reads the first file of a model. If the model is split, only the metadata is complete. Raises GgufError."""
        return cls(file.name, *_read(file))

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number from the metadata. Raises GgufError when it is missing and no default is given."""
        found: int = self._value(key, int, "a whole number", default)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, int | float, "a number", default))

    def text(self, key: str, default: str | None = None) -> str:
        found: str = self._value(key, str, "a text", default)
        return found

    def flag(self, key: str, default: bool | None = None) -> bool:
        found: bool = self._value(key, bool, "true or false", default)
        return found

    def entries(self, key: str, kind: Any, default: list[Any] | None = None) -> list[Any]:
        """Returns a list from the metadata, whose entries must be of the type `kind`."""
        found: list[Any] = self._value(key, list, "a list", default)
        if not all(isinstance(entry, kind) for entry in found):
            raise GgufError(f"{self.name}: {key} holds values of a wrong type")
        return found

    def _value(self, key: str, kind: Any, name: str, default: Any) -> Any:
        found = self.metadata.get(key, default)
        if found is None:
            raise GgufError(f"{self.name} has no {key}")
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise GgufError(f"{self.name}: {key} must be {name}, not {str(found)[:40]!r}")
        return found


class _Reader(GGUFReader):  # type: ignore[misc]  # mypy is told to skip the library
    """The library's reader, in which a truncated file or an unknown type is an error, and an array is one list.

    The library makes several small NumPy arrays for each entry, which takes seconds for a vocabulary.

    places: the tensors by name; the library's own list `tensors` stays empty
    """

    places: dict[str, StoredTensor]

    def __init__(self, path: Path) -> None:
        self._path = path  # `data.filename` is where a link leads: in the hub's cache, a name without a suffix
        self._entries = 0  # of all lists so far
        super().__init__(path)

    def _build_fields(self, offs: int, count: int) -> int:
        _bound(int(count), MOST_KEYS, "keys")
        end: int = super()._build_fields(offs, count)
        return end

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        _bound(int(count), MOST_TENSORS, "tensors")
        found: tuple[int, list[ReaderField]] = super()._build_tensor_info(offs, count)
        return found

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        end = int(offset) + dtype().itemsize * int(count)
        if end > len(self.data):
            raise EOFError(f"it ends after {len(self.data)} bytes")
        _bound(end, MOST_HEADER_BYTES, "bytes")
        return super()._get(offset, dtype, count, override_order)

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        field = super()._get_tensor_info_field(orig_offs)
        _bound(len(field.parts[AXES_PART]), MOST_AXES, f"axes of the tensor {on_one_line(field.name, MAX_NAME)}")
        if (number := int(field.parts[TYPE_PART][0])) not in KNOWN_TYPES:
            name = f"{IK_TYPES[number]} of ik_llama.cpp" if number in IK_TYPES else f"number {number}, which is unknown"
            raise GgufError(
                f"{self._path}: tensor {on_one_line(field.name)} is stored as type {name}; supported are the "
                "types of llama.cpp that docs/quantization.md lists"
            )
        return field

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY:
            found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return found
        number, count = struct.unpack_from("<IQ", self.data, orig_offs)
        kind, begin = GGUFValueType(number), orig_offs + 12
        self._entries += count
        _bound(self._entries, MOST_ENTRIES, "entries in its lists")
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it has an array of arrays, which no model has")
        if kind == GGUFValueType.STRING:
            values, end = _strings(memoryview(self.data), begin, count)
        else:
            array = self._get(begin, self.gguf_scalar_to_np[kind], count)
            values, end = array.tolist(), begin + array.nbytes
        return end - orig_offs, [values], [0], [GGUFValueType.ARRAY, kind]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Finds the tensors and checks that each lies in the file, apart from the others.

        The library would map each tensor, and compute its place with numbers of 64 bits, which may wrap around.
        """
        self.places = {}
        for field in fields:
            if field.name in self.places:
                raise ValueError(f"it has two tensors {field.name}")
            self.places[field.name] = self._place(int(start_offs), field)
        last = ("", 0)
        for name, tensor in sorted(self.places.items(), key=lambda place: (place[1].offset, place[1].nbytes)):
            if tensor.offset < last[1]:
                raise ValueError(f"its tensors {last[0]} and {name} overlap")
            last = name, tensor.offset + tensor.nbytes

    def _place(self, start: int, field: ReaderField) -> StoredTensor:
        _, _, _, sizes, number, offset = field.parts
        shape, type, begin = sizes.tolist()[::-1], GGMLQuantizationType(int(number[0])), start + int(offset[0])
        block, block_bytes = GGML_QUANT_SIZES[type]
        if (columns := shape[-1] if shape else 1) % block:
            raise ValueError(f"tensor {field.name} has rows of {columns} numbers, no whole blocks of {type.name}")
        nbytes = prod(shape) // block * block_bytes
        if begin % WIDEST:
            raise ValueError(f"tensor {field.name} begins at byte {begin}")
        if begin + nbytes > len(self.data):
            raise EOFError(f"it ends after {len(self.data)} bytes, but tensor {field.name} after {begin + nbytes}")
        return StoredTensor(self._path, type.name, tuple(shape), begin, nbytes)


def _bound(count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"its header has {count} {what}, and may have at most {most}")


def _strings(data: memoryview, at: int, count: int) -> tuple[list[str], int]:
    """Returns `count` texts, each stored behind its length, and the offset of their end."""
    found = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8
        if length > len(data) - at:
            raise EOFError(f"it ends after {len(data)} bytes")
        _bound(at + length, MOST_HEADER_BYTES, "bytes")
        found.append(bytes(data[at : at + length]).decode(errors=UNDECODED))
        at += length
    return found, at


def _read(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        with path.open("rb") as file:
            magic, version = file.read(len(MAGIC)), int.from_bytes(file.read(4), "little")
        if magic != MAGIC:
            raise GgufError(f"{path} is not a GGUF file")
        if version and not version & 0xFFFF:
            raise GgufError(f"{path} holds big-endian numbers, which are not supported")
        reader = _Reader(path)
        metadata = {name: _decoded(path, name, _plain(field)) for name, field in reader.fields.items()}
        return metadata, reader.places
    except GgufError:
        raise
    except UnicodeDecodeError as error:
        raise GgufError(f"{path} has a name that is not UTF-8: {error.object[:80]!r}") from error
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, struct.error) as error:
        reason = on_one_line(str(error), MAX_REASON)
        raise GgufError(f"{path} is not a complete GGUF file ({reason}); fetch it again") from error
    except Exception as error:  # the library raises many types of exceptions for broken files
        reason = on_one_line(str(error.args[0] if error.args else error), MAX_REASON)
        raise GgufError(f"{path} is not a valid GGUF file ({reason})") from error


def _plain(field: ReaderField) -> Any:
    """Returns a field's value. A float32 becomes the shortest decimal that rounds to it, for example 1e-06."""
    if field.types == [GGUFValueType.FLOAT32]:
        return float(str(field.parts[field.data[0]][0]))
    if field.types == [GGUFValueType.STRING]:
        return bytes(field.parts[field.data[0]]).decode(errors=UNDECODED)
    return field.parts[field.data[0]] if field.types[:1] == [GGUFValueType.ARRAY] else field.contents()


def _decoded(path: Path, name: str, value: Any) -> Any:
    """Returns a value without undecoded bytes. Raises GgufError for such bytes in a list of a tokenizer."""
    if isinstance(value, str):
        if value.isascii() or (text := _valid(value)) == value:
            return value
        log.warning("%s: %s has bytes that are not UTF-8, which are read as U+FFFD", path.name, name)
        return text
    if not (isinstance(value, list) and value and isinstance(value[0], str)):
        return value
    if (texts := [one if one.isascii() else _valid(one) for one in value]) == value:
        return value
    if name.startswith(TOKENIZER_LISTS):
        raise GgufError(f"{path}: {name} has a text that is not UTF-8")
    log.warning("%s: %s has bytes that are not UTF-8, which are read as U+FFFD", path.name, name)
    return texts


def _valid(text: str) -> str:
    return text.encode(errors=UNDECODED).decode(errors="replace")
