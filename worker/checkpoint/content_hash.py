"""Computes the SHA-256 of a checkpoint's weight files while the weights are loaded.

The hub's cache names its files by their SHA-256. Any other file is read and hashed. The hashes of large files are kept
on disk with each file's path, size and times, so that the next start does not hash these files again.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.private_files import private_cache

log = logging.getLogger("sluice.load")

KEPT = "content-hashes.json"
SHA256 = re.compile(r"[0-9a-f]{64}")
LOWEST_PRIORITY = 19  # a hashing thread runs only where the loading threads leave a processor idle
POLL_S = 0.2
KEPT_BYTES = 16 << 20  # hashes of smaller files are not kept: such a file is hashed faster than its hash is written


class ContentHashes:
    """Computes the hashes of files, in daemon threads."""

    def __init__(self, files: Sequence[Path], keep_in: str = "") -> None:
        """Starts to hash. keep_in: the folder in which hashes are kept; "": the user's cache folder"""
        self._kept = _Kept(_file(keep_in))
        self._hashes: dict[Path, Future[str]] = {file: Future() for file in files}
        self._left = deque(files)
        for _ in range(min(len(files), os.cpu_count() or 1)):
            threading.Thread(target=self._run, name="content-hash", daemon=True).start()

    def wait(self, on_progress: Callable[[], None] = lambda: None) -> list[str]:
        """Waits for all hashes and returns them sorted, so that their order does not depend on the files' names.

        Raises OSError if a file cannot be read.

        on_progress: called at least every POLL_S seconds
        """
        while wait(self._hashes.values(), POLL_S).not_done:
            on_progress()
        return sorted(each.result() for each in self._hashes.values())

    def _run(self) -> None:
        # sets the priority of this thread only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        with suppress(IndexError):
            while file := self._left.popleft():
                try:
                    self._hashes[file].set_result(self._hash(file))
                except OSError as error:
                    self._hashes[file].set_exception(error)

    def _hash(self, file: Path) -> str:
        before = _identity(file)
        found = _named_by_hub(file) or self._kept.get(file, before)
        if not found:
            with file.open("rb", buffering=0) as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if before[0] >= KEPT_BYTES and _identity(file) == before:  # The file did not change while it was hashed.
                self._kept.put(file, before, found)
        return found


def _file(given: str) -> Path | None:
    """Returns the path of the file with the hashes; None if it would be in a folder that other users can write to."""
    try:
        return (Path(given) if given else private_cache()) / KEPT
    except OSError as error:
        log.warning("hashes of weights are not kept: %s: %s", error.filename, error.strerror)
        return None


def _named_by_hub(file: Path) -> str:
    """Returns the name of a file in the hub's cache, which is its hash; "" for any other file."""
    target = file.resolve()
    return target.name if target.parent.name == "blobs" and SHA256.fullmatch(target.name) else ""


def _identity(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


class _Kept:
    """The file with the hashes. If it cannot be written, the next start only takes longer."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()

    def get(self, file: Path, identity: list[int]) -> str:
        """Returns the kept hash of the file; "" if none is kept, or if the file has changed since."""
        match self._read().get(str(file.resolve())):
            case {"identity": known, "sha256": str(found)} if known == identity:
                return found
        return ""

    def put(self, file: Path, identity: list[int], sha256: str) -> None:
        with self._lock:
            entries = {name: entry for name, entry in self._read().items() if Path(name).exists()}
            self._write(entries | {str(file.resolve()): {"identity": identity, "sha256": sha256}}, file)

    def _write(self, entries: dict[str, Any], file: Path) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as written:
                json.dump(entries, written, indent=1)
            os.replace(written.name, self.path)
        except OSError as error:
            log.warning("the hash of %s cannot be kept in %s: %s", file.name, self.path, error.strerror)

    def _read(self) -> dict[str, Any]:
        if self.path is None:
            return {}
        try:
            entries = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
