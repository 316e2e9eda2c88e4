"""One file of the K/V store: a header that says what the file holds, then the bytes of pages and of a state.

    magic, length │ header │ digest of all before │ bytes of the pages of each group, bytes of a recurrent state
    MAGIC, uint16   msgpack   16 bytes              `Head.nbytes`, of which `Head.crc` is the CRC-32

A file holds a run of consecutive pages of one prefix, which end with the page that `Head.digest` names. A reader checks
every byte before it uses one: a file that was cut off, damaged, or written for another model is as good as absent.
"""

import errno
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

MAGIC = b"sluiceKV"
VERSION = 1  # of the format; raised with every change to it
SUM_BYTES = 16
PREFIX = struct.Struct("<8sH")
TEMPORARY = ".part"  # how names of files end that are being written
SHARD, NAME = re.compile("[0-9a-f]{2}"), re.compile("[0-9a-f]{38}")  # of folders and files; NAME_BYTES in all
PIECE = 8 << 20  # bytes that one call of the system reads or writes, so that a cancelled reader is soon free


class Unusable(Exception):
    """A file holds nothing that can be used. `kind` is one of KINDS."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


TORN, FOREIGN, CORRUPTED = "torn", "foreign", "corrupted"
KINDS = (TORN, FOREIGN, CORRUPTED)


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The header. pages: how many pages the run has. absent: for each group of layers, how many of the first of these
    pages are not in the file, because they had left the group's window. state: whether a recurrent state follows."""

    space: bytes  # what the K/V was computed with, and how it lies in memory (StoredPages.space)
    digest: bytes  # the digest of all tokens up to the end of the run
    parent: bytes  # the digest of all tokens before the run; empty if there are none
    tokens: int  # up to the end of the run
    fingerprint: str  # of the model, for people
    pages: int
    absent: tuple[int, ...]
    state: bool
    nbytes: int  # of the payload
    crc: int  # CRC-32 of the payload
    version: int = VERSION


def packed_head(head: Head) -> bytes:
    body = msgspec.msgpack.encode(head)
    begin = PREFIX.pack(MAGIC, len(body)) + body
    return begin + _sum(begin)


def _sum(data: bytes) -> bytes:
    return blake2b(data, digest_size=SUM_BYTES).digest()


def read_head(fd: int) -> tuple[Head, int]:
    """Returns the header, and where the payload begins. Raises Unusable, or OSError."""
    data = os.pread(fd, 4096, 0)
    if len(data) < PREFIX.size:
        raise Unusable(TORN)
    magic, length = PREFIX.unpack_from(data)
    end = PREFIX.size + length
    if magic != MAGIC:
        raise Unusable(FOREIGN)
    if len(data) < end + SUM_BYTES:
        raise Unusable(TORN)
    if _sum(data[:end]) != data[end : end + SUM_BYTES]:
        raise Unusable(CORRUPTED)
    try:
        head = msgspec.msgpack.decode(data[PREFIX.size : end], type=Head)
    except msgspec.DecodeError:
        raise Unusable(FOREIGN) from None
    if head.version != VERSION:
        raise Unusable(FOREIGN)
    return head, end + SUM_BYTES


class Disk:
    """What the store does with files. Tests replace it by disks that are full, read-only or hang."""

    def read_head(self, path: Path) -> Head:
        """Returns the header of a file. Raises FileNotFoundError, another OSError, or Unusable."""
        fd = _opened(path)
        try:
            return read_head(fd)[0]
        finally:
            os.close(fd)

    def read(self, path: Path, space: bytes, digest: bytes) -> tuple[Head, NDArray[np.uint8]]:
        """Returns the header and the payload, uint8 [bytes], of a file, checked.

        Raises FileNotFoundError, another OSError, or Unusable, also if the file has other contents than asked for.
        """
        fd = _opened(path)
        try:
            head, begin = read_head(fd)
            if head.space != space or head.digest != digest:
                raise Unusable(FOREIGN)
            if os.fstat(fd).st_size != begin + head.nbytes:
                raise Unusable(TORN)
            payload = np.empty(head.nbytes, np.uint8)
            crc, at = 0, begin
            for piece in _pieces(payload.data):
                if os.preadv(fd, [piece], at) != len(piece):
                    raise Unusable(TORN)
                at += len(piece)
                crc = zlib.crc32(piece, crc)
        finally:
            os.close(fd)
        if crc != head.crc:
            raise Unusable(CORRUPTED)
        return head, payload

    def write(self, path: Path, pieces: tuple[bytes | memoryview, ...]) -> None:
        """Writes a file, which appears whole or not at all, for this user only. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}-{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for whole in pieces:
                for piece in _pieces(memoryview(whole)):
                    while piece:
                        piece = piece[os.write(fd, piece) :]
            whole_fd, fd = fd, -1
            os.close(whole_fd)  # may fail, too: some disks say only now that they are full
            os.rename(temporary, path)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            temporary.unlink(missing_ok=True)
            raise

    def create(self, path: Path, data: bytes) -> None:
        """Writes a file unless there is one: of several processes, the first one wins. Raises OSError."""
        own = path.with_name(f"{path.name}-{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY}")
        self.write(own, (data,))
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink(missing_ok=True)

    def exists(self, path: Path) -> bool:
        try:
            os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def text(self, path: Path) -> bytes:
        """Returns the first bytes of a small file. Raises FileNotFoundError, another OSError, or Unusable."""
        fd = _opened(path)
        try:
            return os.read(fd, 4096)
        finally:
            os.close(fd)

    def used(self, path: Path, until: float = 0.0) -> None:
        """Notes in the time of a file that it was used now, or counts as used `until` then (seconds since 1970).

        A file that counts as used for longer stays so. Raises OSError.
        """
        latest = max(until, os.stat(path, follow_symlinks=False).st_mtime)
        os.utime(path, (latest, latest) if latest > time.time() else None, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Removes a file, or an empty folder in its place. Raises OSError."""
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):  # systems differ in what they say of a folder
            path.rmdir()

    def files(self, folder: Path) -> Iterator[tuple[Path, int, float]]:
        """Yields (path, bytes, seconds since 1970 of its last use) of each file of a store, and of no other file."""
        for shard in os.scandir(folder):
            if SHARD.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                for entry in os.scandir(shard):
                    if not NAME.match(entry.name) or entry.is_dir(follow_symlinks=False):
                        continue
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # another process has removed it
                        continue
                    yield Path(entry.path), found.st_size, found.st_mtime


def _opened(path: Path) -> int:
    """Opens a file to read it, and never waits for another process, as a pipe does.

    Raises FileNotFoundError, another OSError, or Unusable for what is no file: a link, a folder, a pipe, a device.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise Unusable(FOREIGN) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Unusable(FOREIGN)
    return fd


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), PIECE):
        yield data[begin : begin + PIECE]
