"""Streams: writes deltas to a client as they arrive, in server-sent events or lines of JSON. Knows no API format.

The source calls back at most once in a turn of the event loop. The stream then polls the source, has the
API format's writer turn the deltas into bytes, and sends these with one write (see docs/pictures/token_path.svg).

There are two ways to the socket, with the same bytes. If the client keeps up, and the server offers a DirectWriter
(http_protocol.py), the callback itself writes, and no task is woken. Otherwise a task awaits ASGI's `send`,
and deltas accumulate meanwhile. So a client that reads slowly gets larger writes instead of more writes.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from frontend.request import Delta
from frontend.server.middleware import DirectWriter


@dataclass(frozen=True, slots=True)
class Framing:
    """The media type of a stream, and its bytes between events.

    keep_alive: the bytes that are sent after a long silence; empty: none
    """

    media_type: str
    keep_alive: bytes


SERVER_SENT_EVENTS = Framing("text/event-stream", b": keep-alive\n\n")
JSON_LINES = Framing("application/x-ndjson", b"")  # no keep-alive: clients fail on a line that is not JSON


class DeltaSource(Protocol):
    """The source that a stream polls: a Generation."""

    @property
    def ended(self) -> bool:
        """Whether the last `poll` returned the last deltas."""

    @property
    def error(self) -> Exception | None:
        """The error if the source ended without success."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` soon, and again after each arrival."""

    def detach(self) -> None:
        """Calls nobody any more, and forgets who was called."""

    def poll(self) -> list[Delta]:
        """Returns all deltas since the last call, perhaps none. Never waits."""


class StreamWriter(Protocol):
    """The part of an API format that writes one response as a stream."""

    def write(self, deltas: list[Delta]) -> bytes:
        """Returns the events for these deltas; empty if there is nothing to send."""

    def end(self) -> bytes:
        """Returns the bytes that end a successful stream, such as `data: [DONE]`. Not called after an error."""


class RecordedWriter:
    """A StreamWriter that also stores what another StreamWriter returns."""

    def __init__(self, writer: StreamWriter, kept: list[bytes]) -> None:
        self._writer, self._kept = writer, kept

    def write(self, deltas: list[Delta]) -> bytes:
        data = self._writer.write(deltas)
        self._kept.append(data)
        return data

    def end(self) -> bytes:
        data = self._writer.end()
        self._kept.append(data)
        return data


class EventStream(EventSourceResponse):
    """A response that streams `source` through `writer` until the source has ended or the client has left.

    The base class makes the headers. One task replaces the base class's group of tasks, because that group took
    most of a short response's time. The base class's reaction to signals is left out, because it would cut streams
    off. The service drains them instead.

    stream_error: makes the last event from an error of the source or an exception
    close: called in any case, when nothing more will be polled
    framing: the media type and the keep-alive bytes
    send: the server's `send`; events go directly to it, while the headers go through the middleware
    """

    def __init__(
        self,
        source: DeltaSource,
        writer: StreamWriter,
        *,
        stream_error: Callable[[Exception], bytes],
        close: Callable[[], None],
        keepalive_s: float,
        framing: Framing,
        send: Send,
        direct: DirectWriter | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(iter(()), headers=headers, media_type=framing.media_type, ping=keepalive_s)
        # The base class's `connection: keep-alive` would contradict the `connection: close` of a last response.
        self.raw_headers = [one for one in self.raw_headers if one[0] != b"connection"]
        self._framing = framing
        self._source = source
        self._writer = writer
        self._stream_error = stream_error
        self._close = close
        self._send = send
        self._direct = direct
        self._wakeup = asyncio.Event()  # wakes the task that writes
        self._sending = False  # whether the task holds bytes that are not written yet
        self._ended = False
        self._written_at = time.monotonic()
        self._timer: asyncio.TimerHandle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.create_task(self._watch_client(receive))
        self._check_silence()
        try:
            await self._respond(send)
        finally:
            disconnect.cancel()
            self._timer.cancel()

    async def _respond(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write(self._send)
        finally:
            self._end()
            self._source.detach()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        self._source.on_ready(self._on_ready)
        while not self._ended:
            await self._wakeup.wait()
            self._wakeup.clear()
            self._sending = True
            if data := self._poll() or self._keep_alive():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending = False

    def _on_ready(self) -> None:
        """Writes what has arrived, or wakes the task to write it if writing would have to wait."""
        if self._sending or self._direct is None or not self._direct.ready():
            self._wakeup.set()
            return
        if data := self._poll():
            self._direct.write(data)
        if self._ended:
            self._wakeup.set()

    def _poll(self) -> bytes:
        """Polls the source, and returns the bytes to send now."""
        if self._ended:
            return b""
        try:
            data = self._writer.write(self._source.poll())
            if self._source.ended:
                self._ended = True
                error = self._source.error
                data += self._writer.end() if error is None else self._stream_error(error)
        except Exception as exc:
            self._ended = True
            return self._stream_error(exc)
        if data:
            self._written_at = time.monotonic()
        return data

    async def _watch_client(self, receive: Receive) -> None:
        """Ends the stream when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end()
        self._wakeup.set()

    def _end(self) -> None:
        self._ended = True
        self._close()

    def _check_silence(self) -> None:
        """Wakes the task for a keep-alive when nothing was written for `keepalive_s`."""
        silence = time.monotonic() - self._written_at
        if silence >= self.ping_interval:
            silence = 0.0
            self._wakeup.set()
        self._timer = asyncio.get_running_loop().call_later(self.ping_interval - silence, self._check_silence)

    def _keep_alive(self) -> bytes:
        if self._ended or time.monotonic() - self._written_at < self.ping_interval:
            return b""
        self._written_at = time.monotonic()
        return self._framing.keep_alive
