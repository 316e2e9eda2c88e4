"""Parses one HTTP/1.1 response from bytes that arrive in pieces of any size. Uses no sockets; parses no events."""

import re
from collections.abc import Callable

HEAD_LIMIT = 1 << 16


class MalformedResponse(ValueError):
    """The bytes are not an HTTP response, or it is incomplete."""


class HttpResponse:
    """Parses one response; `feed` returns the complete lines of the body, without chunk sizes and trailers."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self._raw = bytearray()  # not parsed yet
        self._line = bytearray()  # bytes of the body after its last line end
        self._left = 0  # remaining bytes of this chunk, or of a body with a content-length
        self._step: Callable[[], bool] = self._head  # parses the next part; returns False if it needs more bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes, without line ends. Raises MalformedResponse."""
        self._raw += data
        while not self.complete and self._step():
            pass
        *lines, rest = self._line.split(b"\n")
        self._line = rest
        return [bytes(line.removesuffix(b"\r")) for line in lines]

    def finish(self) -> bytes:
        """Ends the response when the connection has closed. Returns the text after the last line; raises
        MalformedResponse if the response is incomplete."""
        if self._step != self._until_close and not self.complete:
            raise MalformedResponse(
                "the answer broke off" if self.status else "the connection closed without an answer"
            )
        return bytes(self._line)

    def _head(self) -> bool:
        head = self._upto(b"\r\n\r\n")
        if head is None:
            return False
        first, *fields = head.decode("latin-1").split("\r\n")
        found = re.match(r"HTTP/1\.[01] (\d{3})", first)
        if not found:
            raise MalformedResponse("this is not HTTP")
        status = int(found[1])
        if status >= 200:  # 1xx responses precede the final one
            self.status = status
            self._step = self._framing({name.lower(): value.strip() for name, _, value in map(_partition, fields)})
        return True

    def _framing(self, headers: dict[str, str]) -> Callable[[], bool]:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._size
        if "content-length" not in headers:
            return self._until_close
        self._left = int(headers["content-length"])
        return self._counted

    def _size(self) -> bool:
        line = self._upto(b"\r\n")
        if line is None:
            return False
        digits = line.split(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", digits):
            raise MalformedResponse("a chunk without a size")
        self._left = int(digits, 16)
        self._step = self._chunk if self._left else self._trailer
        return True

    def _chunk(self) -> bool:
        self._take()
        if self._left or len(self._raw) < 2:
            return False
        if self._upto(b"\r\n") != b"":
            raise MalformedResponse("a chunk longer than its size")
        self._step = self._size
        return True

    def _trailer(self) -> bool:
        line = self._upto(b"\r\n")
        self.complete = line == b""
        return line is not None

    def _counted(self) -> bool:
        self._take()
        self.complete = not self._left
        return False

    def _until_close(self) -> bool:
        self._left = len(self._raw)
        self._take()
        return False

    def _take(self) -> None:
        piece = self._raw[: self._left]
        del self._raw[: len(piece)]
        self._left -= len(piece)
        self._line += piece

    def _upto(self, end: bytes) -> bytes | None:
        """Consumes and returns the bytes before `end`; returns None until `end` arrives."""
        at = self._raw.find(end)
        if at < 0:
            if len(self._raw) > HEAD_LIMIT:
                raise MalformedResponse("a line without an end")
            return None
        found = bytes(self._raw[:at])
        del self._raw[: at + len(end)]
        return found


def _partition(field: str) -> tuple[str, str, str]:
    return field.partition(":")
