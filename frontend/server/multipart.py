"""Reads `multipart/form-data` as it arrives, so that an uploaded file is never in memory as a whole (RFC 7578).

The parser takes up to 0.2 s for a MiB of what looks like boundaries. So only the first bytes of a form are read on the
event loop, all others in a thread.

python-multipart finds the parts; here are the bounds, and the checks of what it lets pass.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError, MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from frontend.errors import BadRequest, UnsupportedMediaType
from frontend.turns import FairThreads

MAX_HEADERS, MAX_HEADER_BYTES = 8, 1024  # headers of a part: how many, and the length of each
MAX_PARTS = 64
FEW_BYTES = 64 << 10  # of a form that are read on the event loop
READ_BYTES = 256 << 10  # bytes that a thread reads at a time
THREADS = FairThreads("forms", 2)  # any number of pieces may wait: a form has one
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part; its bytes follow. filename: empty if it is no file"""

    name: str
    filename: str


def boundary_of(content_type: str) -> bytes:
    """Returns the boundary that a `Content-Type` names. Raises UnsupportedMediaType, and BadRequest without one."""
    kind, options = parse_options_header(content_type)
    if kind != FORM.encode():
        raise UnsupportedMediaType(
            f"`Content-Type` must be {FORM}, not {content_type!r:.80}", code="unsupported_media_type"
        )
    found = options.get(b"boundary", b"")
    if not 0 < len(found) <= 70 or not found.isascii():
        raise BadRequest("`Content-Type` names no boundary of 1 to 70 characters", code="malformed_form")
    return found


async def parts(stream: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[Part | bytes]:
    """Yields each part of a form, and after it its bytes, piece by piece. Raises BadRequest for a malformed form."""
    reader = _Reader(boundary)
    count = 0
    async for data in stream:
        for at in range(0, len(data), READ_BYTES):
            piece = data[at : at + READ_BYTES]
            count += len(piece)
            events = reader.read(piece) if count <= FEW_BYTES else await THREADS.run(reader.read, piece)
            for event in events:
                yield event
    if not reader.ended:
        raise _malformed("it ends within a part")


class _Reader:
    """Gathers what the parser reports. It reports pieces of a header or of a part as they arrive."""

    def __init__(self, boundary: bytes) -> None:
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part, "on_header_field": self._add_name,
                "on_header_value": self._add_value, "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers, "on_part_data": self._add_data, "on_end": self._end,
            },
            max_header_count=MAX_HEADERS, max_header_size=MAX_HEADER_BYTES,
        )  # fmt: skip
        self._events: list[Part | bytes] = []
        self._name, self._value, self._disposition = b"", b"", b""
        self._count = 0
        self.ended = False

    def read(self, data: bytes) -> list[Part | bytes]:
        """Returns what has arrived with the next bytes of the form. Bytes after its end mean nothing."""
        if self.ended:
            return []
        try:
            self._parser.write(data)
        except (MultipartParseError, FormParserError) as error:
            raise _malformed(str(error)) from None
        events, self._events = self._events, []
        return events

    def _begin_part(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _malformed("a part has no name")
        self._events.append(Part(_text(options[b"name"]), _text(options.get(b"filename", b""))))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(data[start:end])

    def _end(self) -> None:
        self.ended = True


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _malformed(why: str) -> BadRequest:
    return BadRequest(f"the form is malformed: {why}", code="malformed_form")
