"""Server-sent events that are bytes already. Knows HTTP messages; knows neither tokens nor dialects.

sse-starlette's response, with its per-event rendering replaced: one write for all that waits, a comment only
after real silence, and an end that is always told. Draining is the service's business, so the library's own
reaction to signals, which would cut streams off, is left out.

There are two ways to the socket with the same bytes. A task awaits the server's `send`, as ASGI has it; and while the
client takes what it is given, and the server offers it (http.py), what has come is put on its way right where it is
told of, without the task, its future and the turns of the loop that these take.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from frontend.server.http_protocol import DirectWriter

KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(EventSourceResponse):
    """Sends what `events` has next whenever `subscribe`'s callback is called, until it is exhausted.

    `events` gives empty bytes when there is nothing now; `failure(exc)` is the last event when it raises; `close()`
    runs in any case. The headers take the way through the middleware, the events go straight to `send`.
    """

    def __init__(
        self,
        events: Iterator[bytes],
        subscribe: Callable[[Callable[[], None]], None],
        *,
        stream_error: Callable[[Exception], bytes],
        close: Callable[[], None],
        keepalive_s: float,
        send: Send,
        direct: DirectWriter | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_nothing(), headers=headers, ping=keepalive_s, client_close_handler_callable=self._gone)
        self._events = events
        self._subscribe = subscribe
        self._stream_error = stream_error
        self._close = close
        self._send = send
        self._direct = direct
        self._wakeup = asyncio.Event()  # for the task
        self._sending = False  # the task has something that is not written yet
        self._ended = False
        self._written = time.monotonic()
        self._timer: asyncio.TimerHandle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the library's, with one task beside this one; its group of four took most of a short answer's time."""
        listening = asyncio.create_task(self._listen_for_disconnect(receive))
        self._check_silence()
        try:
            await self._stream_response(send)
        finally:
            listening.cancel()
            self._timer.cancel()

    async def _stream_response(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write(self._send)
        finally:
            self._end()
        self.active = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        self._subscribe(self._on_ready)
        while not self._ended:
            await self._wakeup.wait()
            self._wakeup.clear()
            self._sending = True
            if data := self._next() or self._comment():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending = False

    async def _gone(self, message: Message) -> None:
        """The client has left."""
        self._end()
        self._wakeup.set()

    def _end(self) -> None:
        self._ended = True
        self._close()

    def _on_ready(self) -> None:
        """Something has come."""
        if self._sending or self._direct is None or not self._direct.ready():
            self._wakeup.set()
            return
        if data := self._next():
            self._direct.write(data)
        if self._ended:
            self._wakeup.set()

    def _next(self) -> bytes:
        """What there is to send now."""
        if self._ended:
            return b""
        try:
            data = next(self._events)
        except StopIteration:
            self._ended = True
            return b""
        except Exception as exc:
            self._ended = True
            return self._stream_error(exc)
        if data:
            self._written = time.monotonic()
        return data

    def _check_silence(self) -> None:
        """Has a comment sent when nothing was for long enough."""
        silence = time.monotonic() - self._written
        if silence >= self.ping_interval:
            silence = 0.0
            self._wakeup.set()
        self._timer = asyncio.get_running_loop().call_later(self.ping_interval - silence, self._check_silence)

    def _comment(self) -> bytes:
        if self._ended or time.monotonic() - self._written < self.ping_interval:
            return b""
        self._written = time.monotonic()
        return KEEP_ALIVE


async def _nothing() -> AsyncIterator[bytes]:
    """For the library, which never gets to it."""
    return
    yield b""
