"""ASGI middleware that keeps the connection of a request alive while the request waits for a model to be loaded.

A stream of server-sent events gets its headers and then comments, `: loading NAME`, so that no proxy takes the silence
for a dead connection. The first comment comes after some seconds. An error before it gets its usual status; an error
after it becomes the error event of the stream. If the client disconnects, its request stops waiting. Only used where
models are loaded on demand.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api.api_formats import ApiFormat
from frontend.api.openai import typed_events
from frontend.api.response_context import ResponseContext
from frontend.request import GenerationRequest
from frontend.server.middleware import API_FORMAT, RECORD, REQUEST_ID, STREAMS, client_error
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling

LONGEST_S = 5.0  # longest pause between two comments
Waiting = Callable[["asyncio.Task[object] | None"], str]


class LoadingComments:
    """The middleware around the routes of an app."""

    def __init__(self, app: ASGIApp, waiting: Waiting, keepalive_s: float) -> None:
        """waiting: a function from the task of a request to the name of the model it waits for ("": none)"""
        self._app, self._waiting = app, waiting
        self._interval = min(keepalive_s, LONGEST_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        task = asyncio.current_task()
        await _Exchange(scope, receive, send, lambda: self._waiting(task), self._interval).run(self._app)


class _Exchange:
    """One request and its response."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, waits_for: Callable[[], str], interval: float
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._waits_for, self._interval = waits_for, interval
        self._next: asyncio.Task[Message] | None = None  # awaits the client's disconnect, which follows the body
        self._handler = asyncio.current_task()
        self._has_left = False
        self._begun = False  # whether the headers were sent for comments
        self._answered = False  # whether the app has begun its response
        self._sending = asyncio.Lock()

    async def run(self, app: ASGIApp) -> None:
        commenting = asyncio.create_task(self._comment())
        try:
            await app(self._scope, self._receive_body, self._send_answer)
        except asyncio.CancelledError:
            if self._has_left and self._handler is not None and not self._handler.uncancel():
                raise ClientDisconnect from None
            raise
        except Exception as exc:
            if not self._begun or self._answered:
                raise
            await self._fail(exc)
        finally:
            commenting.cancel()
            if self._next is not None:
                self._next.cancel()

    async def _receive_body(self) -> Message:
        if self._next is not None:
            return await asyncio.shield(self._next)
        message = await self._receive()
        if not message.get("more_body", False):
            self._next = asyncio.create_task(cast("asyncio._CoroutineLike[Message]", self._receive()))
            self._next.add_done_callback(self._left)
        return message

    def _left(self, next_message: "asyncio.Task[Message]") -> None:
        if not next_message.cancelled() and self._waits_for() and self._handler is not None:
            self._has_left = True
            self._handler.cancel()

    async def _comment(self) -> None:
        while not self._answered:
            await asyncio.sleep(self._interval)
            async with self._sending:
                if (name := self._waits_for()) and not self._answered and (self._begun or self._streams()):
                    await self._begin()
                    comment = f": loading {name}\n\n".encode()
                    await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    def _streams(self) -> bool:
        """Whether the response will be server-sent events."""
        chosen: ApiFormat | None = self._scope.get(API_FORMAT)
        if chosen is None or chosen.FRAMING is not SERVER_SENT_EVENTS:
            return False
        return chosen is typed_events or bool(self._scope.get(STREAMS))

    async def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            headers = EventSourceResponse(iter(()), media_type=SERVER_SENT_EVENTS.media_type).raw_headers
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_answer(self, message: Message) -> None:
        """Sends the app's messages. After a comment, drops the app's headers, because headers are already sent."""
        if not self._answered:
            async with self._sending:
                self._answered = True
        if not (self._begun and message["type"] == "http.response.start"):
            await self._send(message)

    async def _fail(self, exc: Exception) -> None:
        """Ends the stream with the error event of its API format, because its headers already reported success."""
        self._answered = True
        request_id, chosen = self._scope[REQUEST_ID], self._scope[API_FORMAT]
        error = client_error(exc, request_id)
        self._scope[RECORD].failed(error)
        unread = GenerationRequest((), Sampling(max_tokens=1))
        # The tokenizer may not be loaded yet. No format's error event needs it.
        context = ResponseContext(unread, cast(Tokenizer, None), chosen.PREFIX)
        async with self._sending:
            body = chosen.stream_error(error, request_id, context)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
