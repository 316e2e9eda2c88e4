"""Translates a GGUF model into a folder with the files of a Hugging Face checkpoint, without weights.

The folder is kept in a cache (XDG_CACHE_HOME/sluice/gguf). Its name depends on the paths, sizes and times of the GGUF
files, and on the code that translates. Several processes may translate the same files at once: each writes a folder of
its own, and the first to rename it wins. Where the cache cannot be written, or others can write to it, the folder is a
temporary one.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shared.gguf.errors import GgufError
from shared.gguf.naming import INDEX
from shared.gguf.tower_file import TowerFile
from shared.private_files import cache_folder, is_trusted, private_cache

log = logging.getLogger("sluice.gguf")

HERE = Path(__file__).parent
TEMPORARY = "sluice-gguf-"  # how names of temporary folders begin
ROOT = HERE.parents[1]  # the folder that holds the package `shared`


def translated(
    files: Sequence[Path], cache: Path | None = None, *, tower: TowerFile | None = None, only_text: bool = False
) -> Path:
    """Returns the folder for the files of one model, in their order. Raises GgufError when it cannot be served.

    cache: where translated models are kept; None for the user's cache.
    tower: the file of the model's vision tower, if there is one.
    only_text: whether to write only what a frontend needs. The beginning of the first file is then enough.
    """
    files = [file.absolute() for file in files]  # unresolved: only the links in the hub's cache have readable names
    tower = tower and replace(tower, path=tower.path.absolute())
    try:
        cache = cache or gguf_cache()
        folder = cache / f"{files[0].stem}-{_key(files, tower)}{'-text' if only_text else ''}"
        if (folder / INDEX).exists():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".", dir=cache))
    except OSError:
        staging = folder = temporary_folder()
    try:
        _translate(files, staging, tower, only_text)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if staging != folder:
        _move(staging, folder)
    return folder


def gguf_cache() -> Path:
    """Returns the folder of translated models in the user's cache. Other users cannot write to it. Raises OSError."""
    folder = private_cache() / "gguf"
    folder.mkdir(exist_ok=True)
    return folder


def temporary_folder() -> Path:
    """Makes a folder for a translation that cannot be kept in the cache."""
    return Path(tempfile.mkdtemp(prefix=TEMPORARY))


def is_translation(folder: Path) -> bool:
    """Returns whether `translated` made the folder: it lies in the cache, or is a temporary folder of this user."""
    parent = folder.absolute().parent
    if parent == (cache_folder() / "gguf").absolute():
        return True
    is_temporary = parent == Path(tempfile.gettempdir()).absolute() and folder.name.startswith(TEMPORARY)
    return is_temporary and is_trusted(folder)


def _key(files: Sequence[Path], tower: TowerFile | None) -> str:
    all_files = [*files, *([tower.path] if tower else [])]
    try:
        facts: list[object] = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in all_files]
    except OSError as error:
        raise GgufError(f"{error.filename} cannot be read: {error.strerror}") from error
    facts += [tower.given] if tower else []
    digest = hashlib.sha256(json.dumps(facts).encode())
    for source in sorted(HERE.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _translate(files: Sequence[Path], folder: Path, tower: TowerFile | None, only_text: bool) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kind = "text" if only_text else "model"
    beside = ["", ""] if tower is None else ["given" if tower.given else "found", str(tower.path)]
    command = [sys.executable, "-P", "-m", "shared.gguf", kind, str(folder), *beside, *map(str, files)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the translation exited with {done.returncode}"]
        raise GgufError(lines[-1] if done.returncode == 3 else f"{files[0]} cannot be translated: {lines[-1]}")
    for warning in dict.fromkeys(done.stderr.splitlines()):
        log.warning("%s", warning)


def _move(staging: Path, folder: Path) -> None:
    """Renames the folder. If another process has been faster, the folder of the other process stays."""
    with suppress(OSError):
        staging.rename(folder)
        return
    shutil.rmtree(staging, ignore_errors=True)
    if not (folder / INDEX).exists():
        raise GgufError(f"{folder} cannot be written")
