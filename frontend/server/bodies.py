"""Reads the bodies of requests, and limits the size of each body and the size of all bodies in memory together.

All bodies are counted, from their first byte. A tenant may hold SHARE times as many bytes as are still free, so that
others always find memory: one tenant holds at most 170 of 256 MiB, two at most 102 MiB each. When a tenant reaches this
limit, its slowest upload is dropped for a body that arrives faster; so uploads that never end hold no memory for long.

Knows HTTP's requests, but no route, API format or model.
"""

import asyncio
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from frontend.errors import BadRequest, Overloaded, TooLarge, UnsupportedMediaType
from frontend.turns import FairThreads, tenant

# Unpacks the bodies of requests that have a `Content-Encoding` (RFC 9110, 8.4), piece by piece, within bounds.
#
# A few bytes may unpack to gigabytes, so no call makes more than SLICE bytes; who reads a body checks its limits after
# each. The first bytes, which are all of an ordinary body, are unpacked on the event loop; all others in a thread.
# Knows no HTTP request and no limit on a body.

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FEW_BYTES = 64 << 10  # what one body may have unpacked on the event loop: a fifth of a millisecond
SLICE = 1 << 20  # bytes that one call makes in a thread
FED = 16 << 10  # bytes that a decoder gets at once: it copies what it has not read yet at each call
MAX_FRAMES = 64  # gzip members or zstd frames of a body: each costs as much as kilobytes do
ZLIB_WINDOW = 32 << 10
ZSTD_WINDOW_LOG = 23  # 8 MiB: no sender of HTTP may ask for a larger window (RFC 9659)
THREADS = FairThreads("unpacking", 2)  # any number of slices may wait: the bodies themselves are bounded


class Decoder(Protocol):
    """Unpacks one gzip member, zlib stream or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes:
        """What came after the end."""

    def decompress(self, data: bytes, most: int, /) -> bytes:
        """Returns at most `most` bytes. Keeps what it did not read, for the next call."""


class _Zlib:
    """zlib's decoder, which keeps what it has not read."""

    def __init__(self, wbits: int) -> None:
        self._decoder = zlib.decompressobj(wbits)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, most: int, /) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, most)


def _zstd() -> Decoder:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


@dataclass(frozen=True, slots=True)
class Coding:
    """A content coding. window: how many of the last unpacked bytes its decoder keeps, at most"""

    name: str
    decoder: Callable[[], Decoder]
    window: int
    error: type[Exception]

    async def unpacked(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields what the pieces of a body unpack to, at most SLICE bytes at a time.

        Raises BadRequest if the body is not of this coding or ends too early.
        """
        unpacking = _Unpacking(self)
        async for piece in stream:
            for at in range(0, len(piece), FED):
                unpacking.feed(piece[at : at + FED])
                while unpacking.may_have_more:
                    most = FEW_BYTES - unpacking.made
                    data = unpacking.step(most) if most > 0 else await THREADS.run(unpacking.step, SLICE)
                    if data:
                        yield data
        unpacking.end()


CODINGS: Mapping[str, Coding] = {
    one.name: one
    for one in (
        Coding("gzip", lambda: _Zlib(16 + zlib.MAX_WBITS), ZLIB_WINDOW, zlib.error),
        Coding("deflate", lambda: _Zlib(zlib.MAX_WBITS), ZLIB_WINDOW, zlib.error),
        Coding("zstd", _zstd, 1 << ZSTD_WINDOW_LOG, zstd.ZstdError),
    )
}
_ALIASES = {"x-gzip": "gzip"}
ACCEPTED = ", ".join(CODINGS)


def coding_of(header: str) -> Coding | None:
    """Returns the coding that a `Content-Encoding` names; None: the body is as it is. Raises UnsupportedMediaType."""
    name = header.strip().lower()
    if name in ("", "identity"):
        return None
    if (found := CODINGS.get(_ALIASES.get(name, name))) is None:
        raise UnsupportedMediaType(
            f"`Content-Encoding` must be one of {ACCEPTED} or identity, not {header!r:.80}",
            code="unsupported_media_type",
        )
    return found


class _Unpacking:
    """The state of one body."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._decoder: Decoder | None = None  # None: the body has not begun, or a frame has ended
        self._fed, self._frames = b"", 0
        self.may_have_more, self.made = False, 0

    def feed(self, data: bytes) -> None:
        self._fed, self.may_have_more = self._fed + data, True

    def step(self, most: int) -> bytes:
        """Returns the next bytes, at most `most`; none: more must be fed, or a frame has ended."""
        if self._decoder is None:
            self._frames += 1
            if self._frames > MAX_FRAMES:
                raise self._wrong(f"it has more than {MAX_FRAMES} frames")
            self._decoder = self._coding.decoder()
        fed, self._fed = self._fed, b""
        try:
            made = self._decoder.decompress(fed, most)
        except self._coding.error as error:
            raise self._wrong(str(error)) from None
        self.made += len(made)
        self.may_have_more = len(made) == most
        if self._decoder.eof:
            self._fed, self._decoder = self._decoder.unused_data, None
            self.may_have_more = bool(self._fed)
        return made

    def end(self) -> None:
        if self._decoder is not None:
            raise self._wrong("it ends too early")

    def _wrong(self, why: str) -> BadRequest:
        return BadRequest(f"`Content-Encoding`: the body is no {self._coding.name}: {why}", code="malformed_body")


def unpacked(stream: AsyncIterator[bytes], coding: Coding | None) -> AsyncIterator[bytes]:
    """Returns the pieces of a body without its coding."""
    return stream if coding is None else coding.unpacked(stream)


TEXT_BYTES = 8 << 20  # limit for a body without images
IMAGE_BYTES = 8 << 20  # size of an ordinary image in base64: a photograph of 6 MiB
FILE_BYTES = 27 << 20  # size of the largest accepted image in base64, see frontend/chat/images.py
LARGEST_BYTES = 128 << 20  # limit for a body with any number of images
MAX_HELD_BYTES = 256 << 20  # limit for all bodies together
SHARE = 2  # the most bytes of a tenant's bodies, as a multiple of the bytes that are free
GRACE_S = 1.0  # an upload younger than this is not dropped for another; without progress for longer, its rate is 0
HELD = "sluice.body"  # key in a request's scope: the _Body that is counted


def largest_body(images: int) -> int:
    """Returns the limit on a body in bytes. images: how many images it may have; 0: the model accepts none"""
    return TEXT_BYTES + min(max(FILE_BYTES, images * IMAGE_BYTES), LARGEST_BYTES - TEXT_BYTES) * (images > 0)


@dataclass(eq=False, slots=True)
class _Body:
    """A body in memory. Times are those of a monotonic clock, in seconds.

    task: the task that reads the body; cancelled when the upload must make room
    """

    tenant: str
    task: "asyncio.Task[object] | None"
    began: float
    progressed: float
    size: int = 0
    dropped: bool = False

    def rate(self, now: float) -> float:
        """Returns the bytes per second so far; 0 if the upload stands still."""
        return 0.0 if now - self.progressed > GRACE_S else self.size / max(now - self.began, 1e-9)


class Bodies:
    """Counts the bytes of all bodies in memory."""

    def __init__(self) -> None:
        self.held = 0
        self._of_tenants: Counter[str] = Counter()
        self._arriving: dict[str, set[_Body]] = {}

    async def read(self, request: Request, most: int, coding: Coding | None = None) -> bytes:
        """Returns the body of a request. Its bytes stay counted until `release`.

        coding: what the body is unpacked from; `most` then limits both, and what the decoder keeps is counted, too

        Raises TooLarge as soon as its announced, received or unpacked length exceeds `most` bytes, and Overloaded as
        soon as its tenant has no room for it, or if the upload is so slow that others take its place.
        """
        now = time.monotonic()
        body = request.scope[HELD] = _Body(tenant.get(), asyncio.current_task(), now, now)
        announced = request.headers.get("content-length", "0")
        if announced.isdigit():  # checked before `Expect: 100-continue` is answered
            self._check(body, int(announced), most)
        data = bytearray()
        arriving = self._arriving.setdefault(body.tenant, set())
        arriving.add(body)
        try:
            async for piece in unpacked(request.stream(), coding):
                data += piece
                kept = 0 if coding is None else min(len(data), coding.window)
                self._check(body, len(data), most, kept)
                self._count(body, len(data) + kept)
        except asyncio.CancelledError:
            if body.dropped and body.task is not None and not body.task.uncancel():
                raise _full("this one arrived too slowly") from None
            raise
        finally:
            arriving.discard(body)
            if not self._arriving.get(body.tenant, True):
                del self._arriving[body.tenant]
        self._count(body, len(data))
        return bytes(data)

    def release(self, request: Request) -> None:
        """Stops counting the body of this request, when it is no longer in memory."""
        body: _Body | None = request.scope.pop(HELD, None)
        if body is not None:
            self._count(body, 0)

    def _count(self, body: _Body, size: int) -> None:
        if body.dropped:
            return
        more, body.size, body.progressed = size - body.size, size, time.monotonic()
        self.held += more
        self._of_tenants[body.tenant] += more
        if not self._of_tenants[body.tenant]:
            del self._of_tenants[body.tenant]

    def _check(self, body: _Body, size: int, most: int, kept: int = 0) -> None:
        """Raises TooLarge or Overloaded, or drops slower uploads. kept: bytes that the decoder holds in addition"""
        if size > most:
            raise TooLarge(f"the body is larger than {most} bytes (--max-body-bytes)", code="request_too_large")
        size += kept
        while not self._fits(body, size):
            slowest = self._slowest(body)
            if slowest is None:
                raise _full("more than this client may have at once")
            self._drop(slowest)

    def _fits(self, body: _Body, size: int) -> bool:
        more = size - body.size
        free = MAX_HELD_BYTES - self.held - more
        return not more or self._of_tenants[body.tenant] + more <= SHARE * free

    def _slowest(self, body: _Body) -> _Body | None:
        """Returns the tenant's slowest upload, if it is slower than `body`."""
        now = time.monotonic()
        others = [
            one
            for one in self._arriving.get(body.tenant, ())
            if one is not body and one.size and now - one.began > GRACE_S
        ]
        found = min(others, key=lambda one: one.rate(now), default=None)
        is_new = now - body.began <= GRACE_S
        return found if found is not None and (is_new or found.rate(now) < body.rate(now)) else None

    def _drop(self, body: _Body) -> None:
        """Ends an upload. Its bytes stop counting immediately, before its task has ended."""
        self._count(body, 0)
        body.dropped = True
        self._arriving[body.tenant].discard(body)
        if body.task is not None:
            body.task.cancel()


def _full(why: str) -> Overloaded:
    return Overloaded(
        f"the bodies of all requests have {MAX_HELD_BYTES >> 20} MiB together: {why}",
        code="queue_full", retry_after=1.0,
    )  # fmt: skip


# Conversations of WebSockets, kept in memory from one request of a connection to the next.
#
# There is one limit for all of them. When it is reached, the tenant with the most bytes loses its oldest entry. A
# client whose conversation is gone has to send it again in full.

MOST_REMEMBERED_BYTES = 64 << 20


@dataclass(eq=False, slots=True)
class Entry:
    """data: None once it is forgotten"""

    tenant: str
    data: bytes | None


class Remembered:
    """The entries of a process."""

    def __init__(self, most: int = MOST_REMEMBERED_BYTES) -> None:
        self._most = most
        self._entries: dict[Entry, int] = {}  # → its bytes; the oldest first
        self._of_tenants: Counter[str] = Counter()

    def keep(self, tenant: str, data: bytes) -> Entry:
        """Returns an entry with the data; without data if it is larger than the limit on all entries together."""
        entry = Entry(tenant, None)
        if len(data) > self._most:
            return entry
        while self._of_tenants.total() + len(data) > self._most:
            largest = max(self._of_tenants, key=self._of_tenants.__getitem__)
            self.forget(next(one for one in self._entries if one.tenant == largest))
        entry.data, self._entries[entry] = data, len(data)
        self._of_tenants[tenant] += len(data)
        return entry

    def forget(self, entry: Entry) -> None:
        entry.data = None
        if size := self._entries.pop(entry, 0):
            self._of_tenants[entry.tenant] -= size
            if not self._of_tenants[entry.tenant]:
                del self._of_tenants[entry.tenant]
