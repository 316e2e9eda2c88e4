"""Reads and hashes the files of an adapter: two files in a PEFT folder, or one GGUF file. Does not know what the files
mean.

The hash identifies the adapter: after a change of its files, it is another adapter under the same name.
"""

import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import cast

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
GGUF = ".gguf"  # how the name of a GGUF file ends
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 4 << 30


class AdapterError(ValueError):
    """An adapter cannot be used; the message is one sentence that names the file or the unsupported feature."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The bytes of an adapter's files, read once, so that hash and content belong together.

    config: None for a GGUF file, all of whose bytes are `weights`
    """

    config: bytes | None
    weights: bytes

    @property
    def is_gguf(self) -> bool:
        return self.config is None

    @property
    def sha256(self) -> str:
        """The hash of the adapter, which is a hash over the hashes of its files."""
        contents = [content for content in (self.config, self.weights) if content is not None]
        each = [hashlib.sha256(content).digest() for content in contents]
        return hashlib.sha256(b"".join(each)).hexdigest()


def read_files(location: str, *, mapped: bool = False) -> AdapterFiles:
    """Reads an adapter's folder, or its GGUF file. Raises AdapterError.

    mapped: maps the weights, so that they take no memory of their own. The file may then change between two looks, so
        this is only for describing an adapter, whose hash is checked when it is loaded.
    """
    path = Path(location)
    read_weights = _mapped if mapped else _read
    if path.suffix.lower() == GGUF and not path.is_dir():
        return AdapterFiles(None, read_weights(path, MAX_WEIGHTS_BYTES))
    if not path.is_dir():
        raise AdapterError(f"{location} is not a folder with {CONFIG} and {WEIGHTS}, nor a {GGUF} file")
    if not (path / WEIGHTS).exists() and (path / PICKLED).exists():
        raise AdapterError(
            f"{path / PICKLED} is a pickle, which may run any program when it is read: save it as {WEIGHTS}"
        )
    return AdapterFiles(_read(path / CONFIG, MAX_CONFIG_BYTES), read_weights(path / WEIGHTS, MAX_WEIGHTS_BYTES))


def _mapped(file: Path, most: int) -> bytes:
    if not file.is_file() or not 0 < file.stat().st_size <= most:
        return _read(file, most)
    try:
        with file.open("rb") as opened:
            # a map has the methods of bytes that readers of adapters use: length, slices, buffer
            return cast(bytes, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error


def size_of(location: str) -> int:
    """Returns about how many bytes `read_files` reads; 0 if there is nothing to read."""
    path = Path(location)
    try:
        return min((path / WEIGHTS if path.is_dir() else path).stat().st_size, MAX_WEIGHTS_BYTES)
    except (OSError, ValueError):
        return 0


def _read(file: Path, most: int) -> bytes:
    try:
        if not file.is_file():
            raise AdapterError(f"{file} is missing")
        with file.open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise AdapterError(f"{file} has more than {most} bytes")
    return content
