"""Packs a Triton cache to carry it to another machine, with a note that says which machines it fits.

Triton's index files (`__grp__*.json`) hold absolute paths, so the cache works only at the path where it was made. The
cache's keys contain a hash of Triton itself, so both machines need the same build of Triton.
"""

import json
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

NOTE = "sluice-precompiled.json"
ARCHIVE_SUFFIX = ".tar.gz"


@dataclass(frozen=True, slots=True)
class Note:
    """Describes a packed cache. path: the cache folder. key: triton_key() of the compiling Triton. capabilities: the
    GPUs' compute capabilities, such as 90."""

    path: str
    triton: str
    key: str
    capabilities: tuple[int, ...]
    kernels: int
    compile_s: float  # CPU seconds


def triton_key() -> str:
    """Returns the hash of this Triton, which is part of every key of its cache."""
    try:
        from triton.runtime.cache import triton_key as key
    except ImportError:  # older versions of Triton
        from triton.compiler.compiler import triton_key as key
    return str(key())


def pack(folder: Path, capabilities: Iterable[int], kernels: int, compile_s: float) -> Path:
    """Writes the note into the cache folder and packs the folder. Returns the archive's path, next to the folder."""
    note = Note(str(folder), version("triton"), triton_key(), tuple(capabilities), kernels, compile_s)
    (folder / NOTE).write_text(json.dumps(asdict(note), indent=1) + "\n")
    archive = folder.with_name(folder.name + ARCHIVE_SUFFIX)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, str(folder).lstrip("/"))  # if unpacked in /, it gets the same path
    return archive


def misfit(folder: Path) -> str:
    """Returns why the precompiled cache in a folder is of no use on this machine, or an empty string if it fits."""
    if not (folder / NOTE).exists():
        return f"{folder} has none: unpack the archive with `tar xzf {folder.name}{ARCHIVE_SUFFIX} -C /`"
    note = json.loads((folder / NOTE).read_text())
    if Path(note["path"]) != folder.absolute():
        return f"{folder} must be at {note['path']}, where it was compiled: its index files hold that path"
    if note["key"] != triton_key():
        return f"{folder} was compiled by another build of Triton ({note['triton']}; here {version('triton')})"
    return ""
