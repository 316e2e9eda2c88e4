"""Server-sent events that are bytes already. Knows HTTP messages; knows neither tokens nor dialects.

sse-starlette's response, with its per-event rendering replaced: one write for all that waits, a comment only
after real silence, and an end that is always told. Draining is the service's business, so the library's own
reaction to signals, which would cut streams off, is left out.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping

import anyio
from sse_starlette import EventSourceResponse
from starlette.types import Send

KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(EventSourceResponse):
    """Sends what `events` yields; `failure(exc)` is the last event when it raises; `close()` runs in any case.

    The headers take the way through the middleware, the events go straight to `send`.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        failure: Callable[[Exception], bytes],
        close: Callable[[], None],
        keepalive_s: float,
        send: Send,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, headers=headers, ping=keepalive_s)
        self._events = events
        self._failure = failure
        self._close = close
        self._send = send
        self._written = time.monotonic()

    async def _stream_response(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._write(self._send)
        finally:
            self._close()
            await self._events.aclose()
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        try:
            async for data in self._events:
                self._written = time.monotonic()
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            raise  # the client is gone
        except Exception as exc:
            await send({"type": "http.response.body", "body": self._failure(exc), "more_body": True})

    async def _ping(self, send: Send) -> None:
        while self.active:
            silence = time.monotonic() - self._written
            if silence < self.ping_interval:
                await anyio.sleep(self.ping_interval - silence)
                continue
            async with self._send_lock:
                if self.active:
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            self._written = time.monotonic()

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        await anyio.sleep_forever()
