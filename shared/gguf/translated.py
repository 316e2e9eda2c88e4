"""Gives the folder of a translated GGUF model: the files of a Hugging Face checkpoint, without weights.

The folder is kept in a cache (XDG_CACHE_HOME/sluice/gguf). Its name depends on the paths, sizes and times of the GGUF
files, and on the code that translates. Several processes may translate the same files at once: each writes a folder of
its own, and the first to rename it wins. Where the cache cannot be written, the folder is a temporary one.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared.gguf.errors import GgufError
from shared.gguf.naming import INDEX

HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # the folder that holds the package `shared`


def translated(files: Sequence[Path], cache: Path | None = None, *, only_text: bool = False) -> Path:
    """Returns the folder for the files of one model, in their order. Raises GgufError when it cannot be served.

    cache: where translated models are kept; None for the user's cache.
    only_text: write only what a frontend needs. One file is enough, the first, and of that the beginning.
    """
    files = [file.absolute() for file in files]  # not resolved: links of the hub's cache have better names
    cache = cache or cache_folder()
    folder = cache / f"{files[0].stem}-{_key(files)}{'-text' if only_text else ''}"
    if (folder / INDEX).exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".", dir=cache))
    except OSError:
        staging = folder = Path(tempfile.mkdtemp(prefix="sluice-gguf-"))
    try:
        _translate(files, staging, only_text)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if staging != folder:
        _move(staging, folder)
    return folder


def cache_folder() -> Path:
    """Returns the folder of translated models in the user's cache; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sluice" / "gguf"


def _key(files: Sequence[Path]) -> str:
    try:
        facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    except OSError as error:
        raise GgufError(f"{error.filename} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(json.dumps(facts).encode())
    for source in sorted(HERE.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _translate(files: Sequence[Path], folder: Path, only_text: bool) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kind = "text" if only_text else "model"
    command = [sys.executable, "-P", "-m", "shared.gguf", kind, str(folder), *map(str, files)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the translation exited with {done.returncode}"]
        raise GgufError(lines[-1] if done.returncode == 3 else f"{files[0]} cannot be translated: {lines[-1]}")


def _move(staging: Path, folder: Path) -> None:
    """Renames the folder; if another process has been faster, its folder stays."""
    with suppress(OSError):
        staging.rename(folder)
        return
    shutil.rmtree(staging, ignore_errors=True)
    if not (folder / INDEX).exists():
        raise GgufError(f"{folder} cannot be written")
