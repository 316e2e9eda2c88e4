"""The models that clients have pulled, and the names that they have made for models: a file that outlives the server.

The file is JSON. It is replaced as a whole, under a lock, so servers of one user may share it.
"""

import fcntl
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from shared.config.declaration import ConfigError
from shared.model_list import MOST_FILE_BYTES, MOST_MODELS, MOST_NAME_CHARS, Entry, Value
from shared.preset import TAG, Preset

UPLOADS = "uploads"  # beside the library: the files that clients have uploaded
DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
PRESETS = "presets.json"  # in the run folder: the presets, for the frontends
NAME = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*){0,3}(:[\w][\w.\-]*)?")


class LibraryError(Exception):
    """The library cannot be changed so; the message is a sentence. code: the reason for machines"""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Pulled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that a client had fetched. model: as for --model; flags: those that the model needs, by name"""

    model: str
    flags: dict[str, Value] = {}


class Library(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """pulled, presets: by name"""

    pulled: dict[str, Pulled] = {}
    presets: dict[str, Preset] = {}

    @property
    def entries(self) -> list[Entry]:
        return [Entry(one.model, flags=dict(one.flags), name=name) for name, one in self.pulled.items()]


def library_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of this user's library, which need not exist."""
    base = environment.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "sluice" / "library.json"


def uploaded_file(digest: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the path of an uploaded file by its digest, `sha256:` and 64 hexadecimal digits; it need not exist.

    Raises LibraryError for anything else, so that no client chooses a path.
    """
    found = DIGEST.fullmatch(digest)
    if found is None:
        raise LibraryError(f"{digest!r:.100} is not sha256: and 64 digits, from 0 to f", "invalid_digest")
    return library_file(environment).parent / UPLOADS / f"sha256-{found[1]}.gguf"


def read_library(file: Path) -> Library:
    """Reads the library; an empty one if there is no file. Raises ConfigError, which names the file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Library)
    except FileNotFoundError:
        return Library()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}, the library of --allow-pull, cannot be read: {error}") from None


def change_library(file: Path, change: Callable[[Library], Library]) -> Library:
    """Replaces the library by `change` of it, and returns the new one. Waits for other processes that do the same.

    Raises LibraryError if it would become too large, ConfigError if it cannot be read, and OSError.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = change(read_library(file))
        data = msgspec.json.encode(new)
        if len(data) > MOST_FILE_BYTES or len(new.pulled) + len(new.presets) > MOST_MODELS:
            raise LibraryError(f"the library is full: {MOST_MODELS} names, {MOST_FILE_BYTES >> 20} MiB", "library_full")
        part = file.with_suffix(f".{os.getpid()}")
        try:
            part.write_bytes(data)
            part.replace(file)
        finally:
            with suppress(OSError):
                part.unlink()
    return new


def write_presets(folder: Path, presets: Mapping[str, Preset]) -> None:
    """Writes the presets into the run folder, for frontends. Raises OSError."""
    new = folder / f"{PRESETS}.new"
    new.write_bytes(msgspec.json.encode(presets))
    new.replace(folder / PRESETS)


def read_presets(folder: Path) -> dict[str, Preset]:
    """Returns the presets that `write_presets` wrote; none if there is no such file."""
    with suppress(FileNotFoundError):
        return msgspec.json.decode((folder / PRESETS).read_bytes(), type=dict[str, Preset])
    return {}


def plain_name(name: str) -> str:
    """Returns a name without Ollama's default tag, under which the library keeps it.

    Raises LibraryError if a model may not have this name.
    """
    bare = name.removesuffix(TAG)
    if len(bare) > MOST_NAME_CHARS or not NAME.fullmatch(bare):
        raise LibraryError(
            f"{name!r:.80} is no name of a model: letters, digits and `_.-`, up to three `/`, and a tag after `:`, "
            f"{MOST_NAME_CHARS} characters at most",
            "invalid_name",
        )
    return bare
