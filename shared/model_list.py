"""The list of models of a server with many models: entries, and how durations are written in it.

The entries of the table of models: read from a file, or found in a folder. Opens no checkpoint.

A file of TOML has a table for each model:

    [models.small]
    model = "/models/Qwen3-0.6B"
    aliases = ["qwen"]
    preload = true
    flags = { max-seq-len = 4096 }
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from shared.config.declaration import ConfigError
from shared.gguf.naming import models_among, short_name

MOST_MODELS = 512  # limited, because a frontend has metrics for each model
MOST_FILE_BYTES = 4 << 20
MOST_NAME_CHARS = 256
DEEPEST = 4  # levels of folders below --models-dir that are searched
MOST_FOLDERS = 10_000  # folders below --models-dir that are searched
Value = bool | int | float | str


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model of the table.

    model: a checkpoint folder, a GGUF file, or the name of a built-in model
    flags: settings for the model's worker and prompts, by the names of the flags, with or without leading dashes
    preload: whether the model is loaded when the server starts
    pinned: whether the model stays loaded when it is idle or another model needs room
    """

    model: str
    flags: dict[str, Value] = {}
    aliases: tuple[str, ...] = ()
    preload: bool = False
    pinned: bool = False
    name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names for clients; responses have the first name."""
        return tuple(dict.fromkeys((self.name, *self.aliases)))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: dict[str, Entry]


def read_entries(file: Path) -> list[Entry]:
    """Reads the table from a file. Raises ConfigError, which names the file and the key."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--models {file}: {error.strerror}") from None
    if len(data) > MOST_FILE_BYTES:
        raise ConfigError(f"--models {file} is larger than {MOST_FILE_BYTES} bytes")
    decode = msgspec.json.decode if file.suffix == ".json" else msgspec.toml.decode
    try:
        found = decode(data, type=_File).models
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--models {file}: {error}") from None
    entries = [msgspec.structs.replace(entry, name=name) for name, entry in found.items()]
    folder = file.parent
    return checked([msgspec.structs.replace(entry, model=_path(entry.model, folder)) for entry in entries], str(file))


def encode_entries(entries: Iterable[Entry]) -> bytes:
    """Returns the table as JSON, which `read_entries` reads."""
    bare = {entry.name: msgspec.structs.replace(entry, name="") for entry in entries}
    return msgspec.json.encode(_File(bare))


def worker_folder(run_dir: str, name: str) -> Path:
    """Returns the folder with the sockets of a model's worker. The folder stays the same when the table changes.

    Its path is short, because the system limits the length of socket paths.
    """
    return Path(run_dir) / hashlib.sha256(name.encode()).hexdigest()[:10]


def find_entries(folder: Path) -> list[Entry]:
    """Finds the checkpoint folders and GGUF files below a folder. Raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"--models-dir {folder}: there is no such folder")
    entries = [Entry(str(path), name=short_name(str(path))) for path in _checkpoints(folder)]
    if not entries:
        raise ConfigError(f"--models-dir {folder} has no checkpoint folder and no GGUF file")
    return checked(entries, str(folder))


def checked(entries: Sequence[Entry], where: str) -> list[Entry]:
    """Returns the entries. Raises ConfigError for too many entries, a bad name, or a name that two entries have."""
    if not 1 <= len(entries) <= MOST_MODELS:
        raise ConfigError(f"{where} has {len(entries)} models; a server may have 1 to {MOST_MODELS}")
    owners: dict[str, Entry] = {}
    for entry in entries:
        for name in entry.names:
            if not name or len(name) > MOST_NAME_CHARS or "," in name or not name.isprintable():
                raise ConfigError(
                    f"{where}: the name {name!r:.80} must be printable, without a comma, of 1 to {MOST_NAME_CHARS} "
                    "characters"
                )
            if owners.setdefault(name, entry) is not entry:
                raise ConfigError(f"{where}: two models are named {name!r}: {owners[name].model} and {entry.model}")
    return list(entries)


def _path(model: str, folder: Path) -> str:
    """Returns a model's path as the launcher opens it: a relative path in a file starts at the folder of the file."""
    beside = folder / Path(model).expanduser()
    return str(beside) if beside.exists() else model


def _checkpoints(top: Path) -> Iterator[Path]:
    open_folders, searched = [(top, 0)], 0
    while open_folders:
        folder, depth = open_folders.pop(0)
        searched += 1
        if searched > MOST_FOLDERS:
            raise ConfigError(f"--models-dir {top} has more than {MOST_FOLDERS} folders")
        if (folder / "config.json").is_file():
            yield folder
            continue
        names: list[Path] = []
        inner: list[Path] = []
        try:
            for path in sorted(folder.iterdir()):
                (inner if path.is_dir() else names).append(path)
        except OSError as error:
            raise ConfigError(f"--models-dir: cannot read {folder}: {error.strerror}") from None
        for model in models_among(path.name for path in names):
            yield folder / model[0]
        if depth < DEEPEST:
            open_folders += [(path, depth + 1) for path in inner if not path.name.startswith(".")]


# Parses how long a model stays loaded, as users write it: `300`, `90s`, `10m`, `2h`, `1h30m`; `-1` is for ever.

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MOST_S = 1e9  # seconds, some thirty years; the end of a longer duration might not fit into a date
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h)")


def seconds_of(value: str | float) -> float:
    """Returns the duration in seconds; math.inf for any negative one. A number without a unit counts seconds.

    Raises ValueError, whose message continues a sentence that begins with the name of the field or flag.
    """
    if isinstance(value, str):
        value = _parse(value.strip())
    if math.isnan(value):
        raise ValueError("must be a duration like 300, 90s, 10m or -1")
    if value < 0:
        return math.inf
    if value > MOST_S:
        raise ValueError(f"must be at most {MOST_S:g} seconds")
    return float(value)


def _parse(text: str) -> float:
    if re.fullmatch(r"-?\d{1,12}(\.\d{1,9})?", text):
        return float(text)
    sign, body = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = _PART.findall(body)
    if not parts or "".join(number + unit for number, unit in parts) != body:
        raise ValueError(f"must be a duration like 300, 90s, 10m or -1, not {text!r:.40}")
    return sign * sum(float(number) * UNITS[unit] for number, unit in parts)
