"""Reads `multipart/form-data` as it arrives, so that an uploaded file is never in memory as a whole (RFC 7578)."""

import email
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from email.message import Message

from frontend.errors import BadRequest, UnsupportedMediaType

MAX_HEAD_BYTES = 8192  # limit on the headers of a part
MAX_PARTS = 64
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part; its bytes follow. filename: empty if it is no file"""

    name: str
    filename: str


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary that a `Content-Type` names. Raises UnsupportedMediaType, and BadRequest without one."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != FORM:
        raise UnsupportedMediaType(
            f"`Content-Type` must be {FORM}, not {content_type!r:.80}", code="unsupported_media_type"
        )
    found = header.get_param("boundary")
    if not isinstance(found, str) or not 0 < len(found) <= 70 or not found.isascii():
        raise BadRequest("`Content-Type` names no boundary of 1 to 70 characters", code="malformed_form")
    return found.encode()


async def parts(stream: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[Part | bytes]:
    """Yields each part of a form, and after it its bytes, piece by piece. Raises BadRequest for a malformed form."""
    reader = _Reader(boundary)
    async for data in stream:
        for event in reader.feed(data):
            yield event
    if not reader.ended:
        raise _malformed("it ends within a part")


class _Reader:
    """Splits a form at its delimiters. What may be the beginning of a delimiter is held back until more arrives."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = b"\r\n"  # the first delimiter has no line before it
        self._in_part = self._in_head = self.ended = False
        self._count = 0

    def feed(self, data: bytes) -> Iterator[Part | bytes]:
        self._held += data
        while not self.ended:
            if self._in_head:
                head, mark, rest = self._held.partition(b"\r\n\r\n")
                if len(head) > MAX_HEAD_BYTES:
                    raise _malformed(f"the headers of a part have more than {MAX_HEAD_BYTES} bytes")
                if not mark:
                    return
                self._held, self._in_head, self._in_part = rest, False, True
                yield self._part(head)
                continue
            found = self._held.find(self._delimiter)
            if found < 0:
                keep = len(self._delimiter) - 1
                ready, self._held = self._held[:-keep], self._held[-keep:]
                if ready and self._in_part:
                    yield ready
                return
            behind = self._held[found + len(self._delimiter) :]
            line, mark, rest = behind.partition(b"\r\n")
            if behind[:2] != b"--" and not mark:
                if len(behind) > MAX_HEAD_BYTES:
                    raise _malformed("a line with the boundary does not end")
                if found and self._in_part:
                    yield self._held[:found]
                self._held = self._held[found:]
                return
            if found and self._in_part:
                yield self._held[:found]
            if behind[:2] == b"--":
                self.ended, self._held = True, b""
                return
            if line.strip(b" \t"):
                raise _malformed("the boundary is followed by other text")
            # a part without headers begins with the empty line that would end them
            self._held, self._in_head, self._in_part = rest, True, False

    def _part(self, head: bytes) -> Part:
        self._count += 1
        if self._count > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        headers = email.message_from_string(head.decode("latin-1") + "\r\n\r\n")
        name = headers.get_param("name", header="content-disposition")
        if headers.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _malformed("a part has no name")
        return Part(_text(name), _text(headers.get_filename() or ""))


def _text(value: str) -> str:
    """Returns a header's text, which clients send as UTF-8; one with an encoding of its own is decoded already."""
    try:
        return value.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return value


def _malformed(why: str) -> BadRequest:
    return BadRequest(f"the form is malformed: {why}", code="malformed_form")
