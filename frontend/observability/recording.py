"""The record of requests (`--record`): a line for each generating request that has ended, see shared/record.py.

Contains no key and no header. Prompts and answers are hashes, unless --record-text asks for them. A thread writes the
lines, so that a full disk costs lines and never delays a stream; each line says how many lines were lost before it.
"""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import msgspec

from frontend.generation.generation import Generation
from frontend.observability.access_log import LogEntry
from frontend.server.middleware import RequestRecord
from shared.config.declaration import ConfigError
from shared.log import NonBlockingWriter, write_all
from shared.messages import Sampling
from shared.record import VERSION, RecordedRequest, hash_of, older_files
from shared.wire import pack_u32

log = logging.getLogger("sluice.frontend")
MAX_PENDING_BYTES = 64 << 20
# Fields of Sampling that say nothing about texts.
NUMBERS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "ignore_eos", "logprobs",
)  # fmt: skip
ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
_encode = msgspec.json.Encoder().encode


class Recorder:
    """Writes the record; called with each request that has ended."""

    def __init__(self, put: Callable[[bytes], None], dropped: Callable[[], int], close: Callable[[], None]) -> None:
        self._put, self._dropped, self.close = put, dropped, close

    @classmethod
    def to(cls, file: str, max_bytes: int, count: int) -> Self:
        """Opens the file, to which several frontends may write. Raises ConfigError if it cannot be written.

        max_bytes, count: see RecordFiles
        """
        try:
            files = RecordFiles(file, max_bytes, count)
        except OSError as error:
            raise ConfigError(f"--record {file} cannot be written: {error.strerror}") from error
        writer = NonBlockingWriter(files.write, MAX_PENDING_BYTES)

        def close() -> None:
            writer.close()
            files.close()
            if writer.dropped:
                log.warning("--record %s lacks %d requests, which could not be written in time", file, writer.dropped)

        return cls(writer.put, lambda: writer.dropped, close)

    def __call__(self, entry: LogEntry, record: RequestRecord) -> None:
        if record.generation_request is not None and isinstance(record.generation, Generation | None):
            self._put(_encode(line_of(entry, record, self._dropped())) + b"\n")


def line_of(entry: LogEntry, record: RequestRecord, lost: int) -> RecordedRequest:
    """Returns the line of a request that was parsed. lost: how many lines before this one could not be written"""
    request, generation = record.generation_request, record.generation
    assert request is not None
    choices = generation.choices if generation else ()
    began = datetime.now(UTC) - timedelta(milliseconds=entry.total_ms)
    return RecordedRequest(
        VERSION, began.isoformat(timespec="milliseconds"), entry.request_id, entry.path, entry.status, entry.outcome,
        entry.total_ms, entry.ttft_ms, entry.error, record.fingerprint, request.model, request.stream, request.n,
        _numbers(request.sampling), [hash_of(pack_u32(prompt)) for prompt in request.prompts],
        entry.prompt_tokens or 0, entry.cached_tokens or 0, entry.completion_tokens or 0,
        [choice.stream.seed for choice in choices],
        [hash_of(pack_u32(choice.stream.output[: choice.consumed])) for choice in choices],
        [choice.finish.value if choice.finish else None for choice in choices],
        _on_one_line(record.body), b"".join(record.answer).decode(), lost,
    )  # fmt: skip


def _numbers(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in NUMBERS}


def _on_one_line(body: bytes) -> msgspec.Raw | None:
    """Returns a JSON body without line breaks; None if it is empty."""
    if not body:
        return None
    # A line break outside a string is white space, and JSON allows none within a string.
    return msgspec.Raw(body.translate(ONE_LINE))


# The files of a record: FILE, to which lines are added, and older files, from FILE.1 (the newest of them) upwards.
#
# Several processes may add to one record. The process that finds FILE full renames all files; a lock keeps the other
# processes from doing the same. The other processes then notice that FILE is a new file, and open it. Lines that they
# add before that are in FILE.1. If renaming fails, lines are still added to the open file.


class RecordFiles:
    """Writes to the newest file. When it is full, renames all files, but never files without a size, such as pipes."""

    def __init__(self, path: str, max_bytes: int, count: int) -> None:
        """Opens the file, which only its owner may read. Raises OSError, also if the file is another user's.

        max_bytes: the size at which the newest file is full; 0: no limit
        count: how many files are kept, including the newest
        """
        self._path = Path(path).resolve()
        self._max_bytes, self._count = max_bytes, count
        self._descriptor = self._open()
        self._rotates = stat.S_ISREG(os.fstat(self._descriptor).st_mode)

    def write(self, data: bytes) -> int:
        """Writes lines; returns how many bytes of whole lines were written, which are fewer if the disk is full."""
        if self._rotates:
            with suppress(OSError):
                self._reopen_if_replaced()
                size = os.fstat(self._descriptor).st_size
                if self._max_bytes and size and size + len(data) > self._max_bytes:
                    self._rename()
                    self._reopen_if_replaced()
        return write_all(self._descriptor, data)

    def close(self) -> None:
        os.close(self._descriptor)

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode) and info.st_uid != os.geteuid():
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "it belongs to another user", str(self._path))
        if stat.S_ISREG(info.st_mode) and info.st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
        return descriptor

    def _is_current(self) -> bool:
        """Returns whether the open file still has the record's name."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _reopen_if_replaced(self) -> None:
        if not self._is_current():
            old, self._descriptor = self._descriptor, self._open()
            os.close(old)  # closing the file also releases its lock

    def _rename(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process renames the files
            return
        if not self._is_current():
            return
        for number, file in sorted(older_files(self._path).items(), reverse=True):
            if number + 1 < self._count:
                file.rename(self._named(number + 1))
            else:
                file.unlink()
        if self._count > 1:
            self._path.rename(self._named(1))
        else:
            self._path.unlink()

    def _named(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
