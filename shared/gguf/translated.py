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
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shared.gguf.naming import (
    CANNOT_WRITE,
    HUB_NAME,
    INDEX,
    QUANTIZATION,
    SPLIT,
    SUFFIX,
    TEMPORARY,
    GgufError,
    Model,
    chosen,
    listed,
    models_among,
)
from shared.hf_hub import Progress, cached_file, fetch, fetch_beginning, file_names
from shared.private_files import private_cache

# Finds the file with the vision tower of a GGUF model (llama.cpp's "mmproj"): named by a flag, or beside the model.

OFF = "off"  # value of --mmproj: use no tower, even if a file of one lies beside the model
MMPROJ = re.compile(r"(^|[._-])mmproj([._-]|$)", re.IGNORECASE)
PREFERRED = ("F16", "BF16", "F32")  # the number formats to prefer if several files hold the tower


@dataclass(frozen=True, slots=True)
class TowerFile:
    """given: whether --mmproj names the tower, which then must fit the model. A found tower may be left out."""

    path: Path
    given: bool


def tower_file(files: list[Path], mmproj: str) -> TowerFile | None:
    """Returns the file of the tower of a model on this machine; None if there is none.

    mmproj: the value of --mmproj. Raises GgufError if --mmproj names no file.
    """
    if mmproj and mmproj != OFF:
        return given_tower(mmproj)
    if mmproj == OFF:
        return None
    try:
        names = [path.name for path in files[0].parent.iterdir()]
    except OSError:
        return None
    found = tower_among(names, [file.name for file in files])
    return TowerFile(files[0].parent / found, given=False) if found else None


def given_tower(mmproj: str) -> TowerFile:
    """Returns the file that --mmproj names. Raises GgufError if there is none."""
    path = Path(mmproj).expanduser()
    if not path.is_file():
        raise GgufError(f"--mmproj {mmproj}: there is no such file")
    return TowerFile(path, given=True)


def tower_among(names: Iterable[str], model: Model) -> str | None:
    """Returns the tower's file among the files of the model's folder or repository; None if there is no tower.

    Where there are several models, a tower belongs to the model with the same name, apart from the quantization.
    """
    listed = list(names)
    folder = model[0].rpartition("/")[0]
    near = [name for name in listed if name.rpartition("/")[0] == folder]
    towers = [name for name in near if name.lower().endswith(SUFFIX) and MMPROJ.search(name.rpartition("/")[2])]
    if len({_plain(other[0]) for other in models_among(near)}) > 1:
        towers = [name for name in towers if _plain(name) == _plain(model[0])]
    return min(towers, key=_order, default=None)


def _plain(name: str) -> str:
    """Returns a file's name without its quantization, without its number among split files and without "mmproj"."""
    file = name.rpartition("/")[2]
    split = SPLIT.fullmatch(file)
    stem = QUANTIZATION.sub("", split["stem"] if split else file[: -len(SUFFIX)])
    return QUANTIZATION.sub("", MMPROJ.sub("-", stem)).strip("._-").casefold()


def _order(name: str) -> tuple[int, str]:
    found = QUANTIZATION.search(MMPROJ.sub("-", name.rpartition("/")[2][: -len(SUFFIX)]).rstrip("._-"))
    type = found[1].upper() if found else ""
    return PREFERRED.index(type) if type in PREFERRED else len(PREFERRED), name


log = logging.getLogger("sluice.gguf")
HERE = Path(__file__).parent
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
        _translate(files, staging, tower, only_text)
    except OSError:  # the cache cannot be written, or is full
        return _in_temporary_folder(files, tower, only_text)
    _move(staging, folder)
    return folder


def _in_temporary_folder(files: Sequence[Path], tower: TowerFile | None, only_text: bool) -> Path:
    try:
        folder = temporary_folder()
        _translate(files, folder, tower, only_text)
    except OSError as error:
        raise GgufError(f"the translation of {files[0]} cannot be written: {error}") from error
    return folder


def gguf_cache() -> Path:
    """Returns the folder of translated models in the user's cache. Other users cannot write to it. Raises OSError."""
    folder = private_cache() / "gguf"
    folder.mkdir(exist_ok=True)
    return folder


def temporary_folder() -> Path:
    """Makes a folder for a translation that cannot be kept in the cache."""
    return Path(tempfile.mkdtemp(prefix=TEMPORARY))


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
    """Writes the translation into the folder, or removes it. Raises GgufError, and OSError if it cannot be written."""
    try:
        _run(files, folder, tower, only_text)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(files: Sequence[Path], folder: Path, tower: TowerFile | None, only_text: bool) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kind = "text" if only_text else "model"
    beside = ["", ""] if tower is None else ["given" if tower.given else "found", str(tower.path)]
    command = [sys.executable, "-P", "-m", "shared.gguf", kind, str(folder), *beside, *map(str, files)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the translation exited with {done.returncode}"]
        if done.returncode == CANNOT_WRITE:
            raise OSError(lines[-1])
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


# Fetches the GGUF files that `org/repository:NAME` means, and no others, from the Hugging Face hub.

BEGINNING = 32 << 20  # bytes to fetch; the metadata of the largest vocabularies takes a third of them


def fetch_model(
    name: str,
    revision: str = "",
    *,
    mmproj: str = "",
    prefer_cache: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> tuple[list[Path], TowerFile | None]:
    """Returns the files that `name` means, and the file of the model's vision tower; downloads what the cache lacks.

    name: must match HUB_NAME. mmproj: the value of --mmproj; if empty, the tower is the one in the folder of the model.
    prefer_cache: if the cache has all these files, use them without asking the hub for newer ones.
    Raises GgufError when the repository has no such files, and HubError when it cannot be reached.
    """
    if prefer_cache:
        with suppress(GgufError):  # the cache may lack the files that `name` means
            files, tower = _fetched(name, revision, mmproj, True, on_progress)
            if all(file.exists() for file in (*files, *([tower.path] if tower else []))):
                return files, tower
    return _fetched(name, revision, mmproj, False, on_progress)


def _fetched(
    name: str, revision: str, mmproj: str, prefer_cache: bool, on_progress: Progress
) -> tuple[list[Path], TowerFile | None]:
    repository, model, tower = _model(name, revision, mmproj, prefer_cache)
    folder = fetch(
        repository, [*model, *([tower] if tower else [])], revision=revision, prefer_cache=prefer_cache, ignored=(),
        on_progress=on_progress,
    )  # fmt: skip
    beside = TowerFile(folder / tower, given=False) if tower else None
    return [folder / file for file in model], _given(mmproj) or beside


def _given(mmproj: str) -> TowerFile | None:
    return given_tower(mmproj) if mmproj not in ("", OFF) else None


def fetch_text(name: str, revision: str = "", mmproj: str = "") -> Path:
    """Returns a folder with what a frontend needs, tokenizer and configuration, of the model that `name` means.

    Downloads only the beginnings of its first file and of its tower, so that a frontend need not wait for the weights.
    Raises as `fetch_model` does.
    """
    repository, model, tower = _model(name, revision, mmproj, prefer_cache=False)
    file = _beginning(repository, model[0], revision)
    beside = TowerFile(_beginning(repository, tower, revision), given=False) if tower else None
    try:
        return translated([file], tower=_given(mmproj) or beside, only_text=True)
    except GgufError:  # the file is broken, or its metadata is longer than BEGINNING
        files, whole = fetch_model(name, revision, mmproj=mmproj)
        return translated(files, tower=whole, only_text=True)


def fetch_headers(repository: str, model: Model, revision: str = "") -> list[Path]:
    """Returns files with the headers of a model's files, from which `translated` makes a folder without weights.

    Each is as long as the file on the hub. Raises HubError.
    """
    return [_beginning(repository, file, revision) for file in model]


def _beginning(repository: str, file: str, revision: str) -> Path:
    """Returns the file in the hub's cache, or else a file with only the beginning of the hub's file."""
    cached = cached_file(repository, file, revision=revision)
    return cached or fetch_beginning(repository, file, BEGINNING, _writable_cache(), revision=revision)


def _model(name: str, revision: str, mmproj: str, prefer_cache: bool) -> tuple[str, Model, str | None]:
    """Returns the repository, the names of the model's files, and the tower's name unless --mmproj names the tower."""
    found = HUB_NAME.fullmatch(name)
    assert found is not None
    names = file_names(found["repository"], revision=revision, prefer_cache=prefer_cache)
    model = chosen(found["repository"], names, found["wanted"])
    return found["repository"], model, None if mmproj else tower_among(names, model)


def model_files(name: str, revision: str = "") -> list[str]:
    """Returns the names of the files of the model that `name` (see HUB_NAME) means, its vision tower's included.

    Raises GgufError and HubError.
    """
    _, model, tower = _model(name, revision, "", prefer_cache=False)
    return [*model, *([tower] if tower else [])]


def _writable_cache() -> Path:
    try:
        return gguf_cache()
    except OSError:
        return temporary_folder()


def check_not_only_gguf(repository: str, revision: str = "") -> list[str]:
    """Returns the names of a repository's files.

    Raises a GgufError that lists the quantizations if the weights are GGUF files.
    """
    names = file_names(repository, revision=revision)
    if models := models_among(names):
        raise GgufError(
            f"{repository!r} has GGUF files, so say which: {repository}:NAME, where NAME is one of {listed(models)}"
        )
    return names
