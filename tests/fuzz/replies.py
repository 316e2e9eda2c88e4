"""Parses strictly the HTTP replies in the bytes that a connection received."""

import re
from dataclasses import dataclass

STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n\0]*)?\Z")
FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ \t]*[^\r\n\0]*\Z")


class Unfinished(Exception):
    """The bytes end within a reply."""


@dataclass(frozen=True)
class Reply:
    """One HTTP reply."""

    status: int
    headers: dict[str, str]
    body: bytes


def replies(data: bytes, *, to_head: bool = False) -> list[Reply]:
    """Returns the replies in `data`. Raises Unfinished, or ValueError for bytes that are no reply.

    A reply without a length ends with the connection, so it is complete. to_head: replies to HEAD, which have no body
    """
    found = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            raise Unfinished(repr(data[:100]))
        first, *lines = head.split(b"\r\n")
        status = STATUS_LINE.match(first)
        if not status:
            raise ValueError(f"no status line: {first[:100]!r}")
        for line in lines:
            if not FIELD.match(line):
                raise ValueError(f"no header: {line[:100]!r}")
        headers = {
            name.strip().lower().decode(): value.strip().decode("latin-1")
            for name, _, value in (line.partition(b":") for line in lines)
        }
        body, data = _body(int(status[1]), headers, rest, to_head)
        found.append(Reply(int(status[1]), headers, body))
    return found


def _body(status: int, headers: dict[str, str], rest: bytes, to_head: bool) -> tuple[bytes, bytes]:
    """Returns the body of a reply, and the bytes behind it."""
    if status < 200 or status in (204, 304) or (to_head and (not rest or rest.startswith(b"HTTP/1."))):
        return b"", rest
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunks(rest)
    if "content-length" in headers:
        size = int(headers["content-length"])
        if len(rest) < size:
            raise Unfinished(f"{len(rest)} of {size} bytes")
        return rest[:size], rest[size:]
    return rest, b""


def _chunks(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, separator, rest = rest.partition(b"\r\n")
        if not separator:
            raise Unfinished("within the chunks")
        size = int(line, 16)
        if len(rest) < size + 2:
            raise Unfinished("within a chunk")
        if rest[size : size + 2] != b"\r\n":
            raise ValueError("a chunk has another size than it says")
        body, rest = body + rest[:size], rest[size + 2 :]
        if size == 0:
            return body, rest
