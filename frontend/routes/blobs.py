"""Ollama's routes by which clients upload a GGUF file (`ollama create`), on a server with --allow-pull.

A file is written as it arrives, hashed meanwhile, and renamed when it is whole. It is named by its SHA-256 alone, so no
client chooses a path. Until it is whole it has another name, under which nobody looks for it; it is removed when the
upload ends early, and after a crash by the next upload.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from frontend.app_state import AppState
from frontend.errors import BadRequest, NotFound, Overloaded, TooLarge
from frontend.routes.library import library_of
from frontend.server.middleware import RECEIVED
from frontend.turns import tenant
from shared.config.declaration import ConfigError
from shared.model_library import LibraryError, library_file, read_library, uploaded_file
from shared.private_files import private_folder

log = logging.getLogger("sluice.frontend")
PIECE_BYTES = 4 << 20  # bytes of one write
STEP_BYTES = 1 << 20  # an upload that takes longer than --request-timeout for so many bytes is ended
MAGIC = b"GGUF"
SPARE_BYTES = 1 << 30  # of the disk stay free
UNNAMED_S = 24 * 3600.0  # a file that belongs to no model for so long is removed
STARTING_S = 60.0  # by this time after its start, an upload holds the lock of its file
PARTS, WHOLE = ".part-*", "sha256-*.gguf"
MOST_AT_ONCE, MOST_OF_A_TENANT = 4, 2  # of all servers that share the folder
MOST_FILES, MOST_FILES_OF_A_TENANT = 1000, 500
SHARE = 7 / 8  # of the bytes of all uploads that one tenant may have
OWNERS = (
    "uploads-by"  # beside the folder of uploads: a folder for each tenant, with an empty file for each of its files
)
RETRY_S = 10.0


async def look(app: AppState, request: Request) -> Response:
    """Says whether a file was uploaded. Raises Forbidden as `pull` does, BadRequest and NotFound."""
    library_of(app, request)
    if not await asyncio.to_thread(is_here, _file(request)):
        raise NotFound("no file with this digest was uploaded", code="blob_not_found")
    return Response()


async def upload(app: AppState, request: Request) -> Response:
    """Takes a file. Raises Forbidden as `pull` does, BadRequest for another digest or format, TooLarge, Overloaded."""
    library_of(app, request)
    file, most = _file(request), int(app.config.upload_gb * 2**30)
    if await asyncio.to_thread(is_here, file):
        await _skip(request, await asyncio.to_thread(_size, file))
        return Response()
    announced = request.headers.get("content-length", "0")
    try:
        size = await _received(request, file, most, int(announced) if announced.isdigit() else 0)
    except OSError as error:
        raise TooLarge(f"the file cannot be written: {error.strerror or error}", code="disk_full") from None
    log.info("%s was uploaded by %s: %d bytes", file.stem, tenant.get(), size)
    return Response(status_code=201)


def _file(request: Request) -> Path:
    try:
        return uploaded_file(request.path_params["digest"])
    except LibraryError as error:
        raise BadRequest(str(error), param="digest", code=error.code) from None


def _size(file: Path) -> int:
    return file.stat().st_size


async def _received(request: Request, file: Path, most: int, announced: int) -> int:
    arriving = await asyncio.to_thread(Upload, file, most, announced, tenant.get())
    try:
        async for piece in _pieces(request):
            await asyncio.to_thread(arriving.write, piece)
        return await asyncio.to_thread(arriving.finish)
    finally:
        await asyncio.shield(asyncio.to_thread(arriving.close))


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    held, since = bytearray(), 0
    async for data in request.stream():
        held += data
        since += len(data)
        if since >= STEP_BYTES:
            request.scope[RECEIVED], since = object(), 0
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _skip(request: Request, most: int) -> None:
    """Reads a body that is not needed, because clients send all of it before they read the answer."""
    async for piece in _pieces(request):
        most -= len(piece)
        if most < 0:
            raise BadRequest("the body is longer than the file with this digest", code="digest_mismatch")


# What follows blocks, so it is for threads.


class Upload:
    """A file that arrives. Ends with `close`, before it perhaps with `finish`."""

    def __init__(self, target: Path, most: int, announced: int = 0, tenant: str = "") -> None:
        """target: of `uploaded_file`; most: bytes of all uploads together; announced: of this one, 0 if not known

        Raises Overloaded if too many files arrive already, TooLarge if there is no room, and OSError.
        """
        self._target, self._most = target, most
        self._hash, self._size = hashlib.sha256(), 0
        self._lock, self._closed = threading.Lock(), False  # a cancelled request closes while a thread still writes
        self._folder = private_folder(target.parent)
        remove_forgotten(self._folder)
        owner = hashlib.sha256(tenant.encode()).hexdigest()[:16]
        self._own = target.parent.with_name(OWNERS) / owner
        self._check_count()
        parts = [file.name for file, _, _ in _files(self._folder, PARTS)]
        if len(parts) >= MOST_AT_ONCE or sum(owner in name for name in parts) >= MOST_OF_A_TENANT:
            raise Overloaded(f"{len(parts)} files arrive already: try again later", code="busy", retry_after=RETRY_S)
        self._check_free(announced)
        self._part = self._folder / f".part-{owner}-{secrets.token_hex(8)}"
        self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: bytes) -> None:
        """Adds the next bytes. Raises BadRequest for what is no GGUF file, TooLarge, and OSError."""
        with self._lock:
            if not self._closed:
                self._write(data)

    def _write(self, data: bytes) -> None:
        if self._size == 0 and not data.startswith(MAGIC):
            raise BadRequest("the file is not in the format GGUF: nothing else can be uploaded", code="not_gguf")
        self._check_free(len(data))
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> int:
        """Gives the file its name, and returns its bytes. Raises BadRequest if it has another digest, and OSError."""
        if self._target.name != f"sha256-{self._hash.hexdigest()}.gguf":
            raise BadRequest(
                f"the {self._size} bytes that arrived have the digest sha256:{self._hash.hexdigest()}",
                code="digest_mismatch",
            )
        os.fsync(self._file)  # the digest is not checked again
        self._check_count()
        private_folder(self._own.parent)
        (private_folder(self._own) / self._target.name).touch(0o600)
        self._part.replace(self._target)
        return self._size

    def close(self) -> None:
        """Removes what is not finished."""
        with self._lock:
            self._closed = True
            os.close(self._file)
            _remove(self._part)

    def _check_count(self) -> None:
        count, own = len(_files(self._folder, WHOLE)), len(_owned(self._own, self._folder))
        if count >= MOST_FILES or own >= MOST_FILES_OF_A_TENANT:
            raise TooLarge(
                f"there are {count} uploaded files, {own} of them by this client; there may be {MOST_FILES}, and "
                f"{MOST_FILES_OF_A_TENANT} of one client: delete models that were uploaded", code="storage_limit",
            )  # fmt: skip

    def _check_free(self, more: int) -> None:
        own = sum(_owned(self._own, self._folder)) + self._size
        if own + more > self._most * SHARE:
            raise TooLarge(
                f"one client may have {self._most * SHARE / 2**30:g} GiB of uploads ({SHARE:g} of --upload-gb), and "
                f"has {own / 2**30:.2f}: delete models that were uploaded", code="storage_limit",
            )  # fmt: skip
        used = sum(size for _, size, _ in _files(self._folder, PARTS, WHOLE))
        if used + more > self._most:
            raise TooLarge(
                f"all uploads together may have {self._most / 2**30:g} GiB (--upload-gb), and there are "
                f"{used / 2**30:.2f}: delete models that were uploaded", code="storage_limit",
            )  # fmt: skip
        if shutil.disk_usage(self._folder).free - more < SPARE_BYTES:
            raise TooLarge("the disk is full but for the GiB that stays free", code="disk_full")


def is_here(target: Path) -> bool:
    """Returns whether a file was uploaded, and keeps it for a day although no model has it yet."""
    with suppress(OSError):
        os.utime(target, follow_symlinks=False)
        return target.is_file() and not target.is_symlink()
    return False


def remove_forgotten(folder: Path, now: float | None = None) -> None:
    """Removes parts whose server has ended, and files that no model has had for a day."""
    now = time.time() if now is None else now
    for file, _, changed in _files(folder, PARTS):
        if now - changed > STARTING_S and _is_unlocked(file):
            _remove(file)
    old = [file for file, _, changed in _files(folder, WHOLE) if now - changed > UNNAMED_S]
    with suppress(ConfigError):  # a library that cannot be read may name all of them
        named = {one.model for one in read_library(library_file()).pulled.values()} if old else set()
        for file in old:
            if str(file) not in named:
                _remove(file)


def _owned(own: Path, folder: Path) -> list[int]:
    """Returns the bytes of each uploaded file of a tenant. own: its folder, from which records of removed files go"""
    sizes = []
    for record, _, _ in _files(own, WHOLE):
        try:
            sizes.append((folder / record.name).stat().st_size)
        except OSError:
            _remove(record)
    return sizes


def _files(folder: Path, *patterns: str) -> list[tuple[Path, int, float]]:
    """Returns the files with these names, their bytes, and when they were changed."""
    found = []
    for file in (file for pattern in patterns for file in folder.glob(pattern)):
        with suppress(OSError):
            info = file.lstat()
            found.append((file, info.st_size, info.st_mtime))
    return found


def _is_unlocked(file: Path) -> bool:
    with suppress(OSError):
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(opened)
    return file.is_symlink()


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink()
