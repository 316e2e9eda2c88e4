"""A tier of the K/V store: a folder of content-addressed files, which any number of processes and hosts may share.

The name of a file is a keyed hash of the digest of the tokens that it holds. The key is the folder's *token*, a small
file. Replacing the token empties the folder for everybody at once: no reader finds an earlier file, and what a
writer began before then gets a name that nobody looks for. There is no lock, and nothing to repair after a crash.

Operations may fail or hang, as disks do. A tier that has failed or hangs is not used for a while, which the log says at
intervals; the store goes on without it.
"""

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.config.declaration import ConfigError
from worker.kv_cache.store_file import KINDS, TEMPORARY, Disk, Head, Unusable

log = logging.getLogger("sluice.kv_store")

TOKEN = "token"  # the name of the file with the token
TOKEN_BYTES = 16
NAME_BYTES = 20
PAGES, STATE = b"p", b"s"  # kinds of files: a block of pages; a recurrent state, with the pages since the last block
PINNED = ".pinned"  # a file NAME.pinned makes the janitor keep the file NAME
PAUSE_S = 10.0  # how long a tier that failed is not used
HUNG_S = 3.0  # an operation that takes longer counts as hung, and the tier is not used until it returns
WARN_S = 60.0  # between two warnings of a tier
STALE_S = 600.0  # unfinished files that nobody has written to for so long are removed
SWEEP_S = 60.0  # between two looks at the whole folder, in which other processes write, too
ROOM = 0.05  # the janitor makes this share of the limit free
WITHOUT, WITHOUT_WRITING = "requests are computed without it", "nothing is written there"
MAKING_ROOM = "the least recently used files make room"
FULL = (errno.ENOSPC, errno.EDQUOT)  # what systems say when the disk, or this user's share of it, is full
KEPT = 0.5  # the most of the limit that files take which requests want to be kept


@dataclass(slots=True)
class TierCounts:
    """What a tier has done since the start. Threads add to it; each count may be a moment old when it is read."""

    hits: int = 0  # files that were read and used
    misses: int = 0  # prefixes of which the store had nothing more
    tokens: int = 0  # tokens of the files that were read
    read_bytes: int = 0
    read_s: float = 0.0
    written: int = 0
    written_bytes: int = 0
    written_s: float = 0.0
    evictions: int = 0
    dropped: int = 0  # files that were not written, because the tier failed, hung or did not keep up
    failures: int = 0  # operations that the system refused
    vanished: int = 0  # files that were there a moment ago
    unusable: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    nbytes: int = 0  # bytes of all files, as of the last look at the folder and what was written since


def check_folder(folder: Path) -> None:
    """Makes the folder if it is missing. Raises ConfigError if others could write to it, or if it is no folder.

    A folder that cannot be made or looked at is no error: it may be there later, and the store does without it.
    """
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        found = folder.stat()
    except OSError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"--kv-store {folder} is not a folder")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise ConfigError(
            f"--kv-store {folder} must belong to this user, and others must not be able to write to it: who can, "
            "decides what the model reads"
        )


class Tier:
    """A folder of at most `limit` bytes. Methods may block, and are for the threads of the store, unless they say that
    the compute loop may call them."""

    def __init__(
        self, folder: Path, limit: int, space: bytes, disk: Disk, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """space: what the files must have in common with this worker (StoredPages.space)"""
        self.folder, self.limit, self.counts = folder, limit, TierCounts()
        self.token = b""  # as of the last time that it was read; b"": not known yet
        self.reset_to = b""  # the token that this process wants to replace it by; b"": none
        self._space, self._disk, self._clock = space, disk, clock
        self._paused_until = self._full_until = 0.0
        self._warned = -WARN_S
        self._swept = -SWEEP_S
        self._lock, self._replacing = threading.Lock(), threading.Lock()
        self._doing: dict[int, float] = {}  # thread → since when it is in an operation

    @property
    def hangs(self) -> bool:
        """Whether an operation takes too long. The loop and threads may ask, as of the next two."""
        now = self._clock()
        return any([now - since > HUNG_S for since in tuple(self._doing.values())])

    @property
    def usable(self) -> bool:
        """Whether files can be read: the tier neither failed a moment ago nor hangs."""
        if self.hangs:
            self._warn(f"the disk hangs for more than {HUNG_S:g} s")
            return False
        return self._clock() >= self._paused_until and not self.reset_to

    @property
    def writable(self) -> bool:
        """Whether files can be read and written. A full or read-only disk can still be read."""
        return self.usable and self._clock() >= self._full_until

    def path(self, digest: bytes, kind: bytes, token: bytes = b"") -> Path:
        name = blake2b(kind + digest, key=token or self.token, digest_size=NAME_BYTES, person=b"sluice-kv").hexdigest()
        return self.folder / name[:2] / name[2:]

    @contextmanager
    def operation(self, *, writes: bool = False) -> Iterator[None]:
        """Runs an operation: notices that it hangs, and pauses the tier if the system refuses it (OSError).

        writes: it changes files, so that only such operations are paused
        """
        thread = threading.get_ident()
        self._doing[thread] = self._clock()
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            self.counts.failures += 1
            until = self._clock() + PAUSE_S
            if writes:
                self._full_until = until
            else:
                self._paused_until = until
            self._warn(error.strerror or str(error), WITHOUT_WRITING if writes else WITHOUT)
            raise
        finally:
            del self._doing[thread]

    def _warn(self, text: str, meanwhile: str = WITHOUT) -> None:
        now = self._clock()
        if now - self._warned >= WARN_S:
            self._warned = now
            log.warning("--kv-store %s: %s; %s for now", self.folder, text, meanwhile)

    # the token

    def ask_reset(self, token: bytes) -> None:
        """Makes the next refresh() replace the token; until then, the tier is not usable. The loop may call it."""
        with self._lock:
            self.reset_to = token

    def refresh(self) -> bytes:
        """Reads the token, and makes one if there is none. Returns it; b"" if this tier cannot be used. Never raises.

        If this process wants another token, it is written first.
        """
        try:
            with self.operation():
                if wanted := self.reset_to:
                    self._write(self.folder / TOKEN, (wanted,))
                    with self._lock:
                        self.reset_to = b"" if self.reset_to == wanted else self.reset_to
                self.token = self._read_token()
        except OSError:
            return b""
        return self.token

    def _read_token(self) -> bytes:
        path = self.folder / TOKEN
        try:
            found = self._intact_token(path)
        except FileNotFoundError:
            self._disk.create(path, os.urandom(TOKEN_BYTES))
            return self._disk.text(path)
        if not found:  # it is damaged: what it named is lost
            with self._replacing:  # of several threads that find it so, the first one gives the new one
                if not self._intact_token(path):
                    self._disk.write(path, (os.urandom(TOKEN_BYTES),))
                found = self._disk.text(path)
        return found

    def _intact_token(self, path: Path) -> bytes:
        """Returns b"" for a damaged token. Raises OSError."""
        try:
            found = self._disk.text(path)
        except Unusable:
            return b""
        return found if len(found) == TOKEN_BYTES else b""

    # files

    def exists(self, digest: bytes, kind: bytes) -> bool:
        """Whether there is a file. Raises OSError."""
        with self.operation():
            return self._disk.exists(self.path(digest, kind))

    def head(self, digest: bytes, kind: bytes) -> Head | None:
        """Returns the header of a file; None if there is no file that can be used. Raises OSError."""
        path = self.path(digest, kind)
        try:
            with self.operation():
                head = self._disk.read_head(path)
                if head.space != self._space or head.digest != digest:
                    raise Unusable("foreign")
                return head
        except FileNotFoundError:
            return None
        except Unusable as problem:
            self._spoiled(path, problem)
            return None

    def read(self, digest: bytes, kind: bytes, tokens: int) -> tuple[Head, NDArray[np.uint8]] | None:
        """Returns the header and the payload of a file; None if it has vanished or cannot be used. Raises OSError.

        tokens: how many tokens the file has, for the counts
        """
        path, began = self.path(digest, kind), time.perf_counter()
        try:
            with self.operation():
                head, payload = self._disk.read(path, self._space, digest)
                with suppress(OSError):
                    self._disk.used(path)
        except FileNotFoundError:
            self.counts.vanished += 1
            return None
        except Unusable as problem:
            self._spoiled(path, problem)
            return None
        with self._lock:
            self.counts.hits += 1
            self.counts.tokens += tokens
            self.counts.read_bytes += payload.nbytes
            self.counts.read_s += time.perf_counter() - began
        return head, payload

    def _spoiled(self, path: Path, problem: Unusable) -> None:
        """Counts a file that cannot be used, and removes it, so that a good one can take its place."""
        self.counts.unusable[problem.kind] += 1
        with self.operation(), suppress(OSError):
            self._disk.remove(path)

    def used(self, digest: bytes, kind: bytes, until: float = 0.0) -> bool:
        """Notes that a prefix was used, from memory, so that its file is kept. Returns False if there is none.

        until: see Disk.used
        """
        try:
            with self.operation(writes=True):
                self._disk.used(self.path(digest, kind), until)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def write(
        self, digest: bytes, kind: bytes, token: bytes, pieces: tuple[bytes | memoryview, ...], until: float = 0.0
    ) -> bool:
        """Writes a file unless it exists. Returns whether it is there now. Never raises.

        token: the token when the pages were computed. If it was replaced since, nothing is written.
        until: see Disk.used
        """
        counts, began, nbytes = self.counts, time.perf_counter(), sum(map(len, pieces))
        if not self.writable or not token or self.refresh() != token or nbytes > self.limit * (1 - ROOM):
            counts.dropped += 1
            return False
        try:
            with self.operation(writes=True):
                path = self.path(digest, kind, token)
                if self._disk.exists(path):
                    self._disk.used(path, until)
                    return True
                self.keep_size(nbytes)
                if counts.nbytes + nbytes > self.limit:  # pinned files leave no room
                    counts.dropped += 1
                    return False
                self._write(path, pieces)
                if until:
                    self._disk.used(path, until)
        except OSError:
            counts.dropped += 1
            return False
        counts.nbytes += nbytes
        counts.written += 1
        counts.written_bytes += nbytes
        counts.written_s += time.perf_counter() - began
        return True

    def _write(self, path: Path, pieces: tuple[bytes | memoryview, ...]) -> None:
        """Writes a file. On a full disk, files of this folder make room first, once. Raises OSError."""
        try:
            self._disk.write(path, pieces)
        except OSError as error:
            if error.errno not in FULL or not self.sweep(free=sum(map(len, pieces))):
                raise
            self.counts.failures += 1
            self._warn(error.strerror or str(error), MAKING_ROOM)
            self._disk.write(path, pieces)

    # the janitor

    def keep_size(self, more: int = 0) -> None:
        """Removes the least recently used files if `more` bytes do not fit, and what broken writers have left.

        Raises OSError. Looks at the folder only if it may be too full, or if it was not looked at for SWEEP_S.
        """
        now = self._clock()
        if self.counts.nbytes + more <= self.limit and now - self._swept < SWEEP_S:
            return
        self._swept = now
        self.sweep(more)

    def sweep(self, more: int = 0, *, free: int = 0) -> int:
        """Removes the least recently used files if `more` bytes do not fit. Returns how many files it has removed.

        free: bytes that must become free although the folder is not at its limit; ROOM of the folder, if that is more

        Raises OSError.
        """
        found, total, pinned = [], 0, set[str]()
        for path, nbytes, used in self._disk.files(self.folder):
            if path.name.endswith(PINNED):
                pinned.add(path.name.removesuffix(PINNED))
            elif not path.name.endswith(TEMPORARY):
                found.append((used if nbytes <= self.limit else 0.0, nbytes, path))  # else it leaves no room for others
                total += nbytes
            elif time.time() - used > STALE_S:
                self._disk.remove(path)
        most = self.limit * (1 - ROOM) - more if total + more > self.limit else self.limit
        if free:
            most = min(most, total - max(free, total * ROOM))
        removed = 0
        for _, nbytes, path in self._in_order(found) if total > most else ():
            if total <= most:
                break
            if path.name not in pinned:
                self._disk.remove(path)
                removed += 1
                total -= nbytes
        self.counts.evictions += removed
        self.counts.nbytes = total
        return removed

    def _in_order(self, files: list[tuple[float, int, Path]]) -> list[tuple[float, int, Path]]:
        """Returns files, (used, bytes, path) each, as they are removed: the least recently used first.

        Files that count as used beyond now therefore go last, but only so many of them that they take KEPT of the
        limit: the others go first, or who asks for it could keep everybody else out.
        """
        ascending, now, left = sorted(files, key=lambda one: one[:2]), time.time(), self.limit * KEPT
        first = sum([used <= now for used, _, _ in ascending])
        last = len(ascending)
        while last > first and (left := left - ascending[last - 1][1]) >= 0:
            last -= 1
        return [*ascending[first:last], *ascending[:first], *ascending[last:]]

    def empty(self) -> None:
        """Removes all files, which nobody can find any more. Never raises."""
        with suppress(OSError), self.operation(writes=True):
            for path, _, _ in self._disk.files(self.folder):
                self._disk.remove(path)
            self.counts.nbytes = 0
