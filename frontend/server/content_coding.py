"""Unpacks the bodies of requests that have a `Content-Encoding` (RFC 9110, 8.4), piece by piece, within bounds.

A few bytes may unpack to gigabytes, so no call makes more than SLICE bytes; who reads a body checks its limits after
each. The first bytes, which are all of an ordinary body, are unpacked on the event loop; all others in a thread.
Knows no HTTP request and no limit on a body.
"""

import sys
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from frontend.errors import BadRequest, UnsupportedMediaType
from frontend.turns import FairThreads

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
