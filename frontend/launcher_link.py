"""The connection to the launcher, which says which models are loaded and learns which models requests need.

This module counts, for each model, the requests that use it and the requests that wait for it. It tells the launcher
when one of these numbers becomes zero or ceases to be zero. A model counts as used for LINGER_S after its last request,
so a client that sends one request after another causes no messages. Knows no tokenizer.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api.answer import ResponseContext
from frontend.api.formats import ApiFormat
from frontend.api.openai import typed_events
from frontend.model_table import Asked
from frontend.request import GenerationRequest
from frontend.server.middleware import API_FORMAT, RECORD, REQUEST_ID, STREAMS, client_error
from frontend.server.sse import SERVER_SENT_EVENTS
from frontend.text.tokenizer import Tokenizer
from shared.launcher_messages import (
    SOCKET,
    Ask,
    Done,
    Download,
    Forget,
    ModelState,
    Order,
    Reload,
    Reloaded,
    Seen,
    Sleep,
    Table,
    frame,
    read_from_launcher,
)
from shared.messages import Sampling

log = logging.getLogger("sluice.models")
LINGER_S = 0.5
RECONNECT_S = 0.2
MOST_SLEEP_WAIT_S = 300.0  # how long to wait until all models are unloaded
POLL_S = 0.05
MOST_ENDED = 32  # ended downloads whose end is remembered
LOST = "there is no connection to the launcher; try again"


class LauncherLink:
    """The connection to the launcher. `states` has the launcher's last report about each model, by name; `reading` is
    how often the launcher has read the table of models; `asleep` is whether the launcher loads no models."""

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        """folder: the run folder, which holds the launcher's socket; changed: called after each report"""
        self.states: dict[str, ModelState] = {}
        self.connected = False
        self.reading = 0
        self.asleep = False
        self._path = folder / SOCKET
        self._changed = changed
        self._version = 0
        self._used: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._said: Seen | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reloads: deque[asyncio.Future[str]] = deque()  # answered by the launcher in this order
        self.downloads: dict[str, Download] = {}  # the last news of each running download, and of some that have ended
        self._asked: dict[int, Asked] = {}  # by ticket
        self._tickets = itertools.count(1)
        self.news = 0
        self._has_news = asyncio.Event()

    async def run(self) -> None:
        """Connects, and connects again after every loss, until cancelled."""
        while True:
            with contextlib.suppress(EOFError, OSError, ValueError):
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._said = None
                try:
                    while True:
                        message = await read_from_launcher(reader)
                        match message:
                            case Reloaded():
                                _resolve(self._reloads.popleft(), message.problem)
                            case Download():
                                self._take_download(message)
                            case Done():
                                if (asked := self._asked.pop(message.ticket, None)) is not None:
                                    asked.end(message)
                            case _:
                                self._take(message)
                        self._tell_news()
                finally:
                    self.connected = False
                    while self._reloads:
                        _resolve(self._reloads.popleft(), LOST)
                    for ticket in list(self._asked):
                        self._asked.pop(ticket).end(Done(ticket, LOST, "not_ready"))
                    self.downloads.clear()
                    self._tell_news()
                    self._writer.close()
                    self._writer = None
            await asyncio.sleep(RECONNECT_S)

    def _take(self, table: Table) -> None:
        self.states = {model.name: model for model in table.models}
        self._version, self.reading, self.asleep, self.connected = table.version, table.reading, table.asleep, True
        self._changed()
        self._tell()

    def _take_download(self, download: Download) -> None:
        ended = [name for name, one in self.downloads.items() if one.ended]
        for name in [download.name, *ended[: max(0, len(ended) - MOST_ENDED)]]:
            self.downloads.pop(name, None)
        self.downloads[download.name] = download
        for asked in self._asked.values():
            if asked.name == download.name and not download.ended:
                asked.add(download)

    def _tell_news(self) -> None:
        self.news += 1
        told, self._has_news = self._has_news, asyncio.Event()
        told.set()

    async def next_news(self, seen: int) -> None:
        """Waits until `news` is more than `seen`."""
        while self.news <= seen:
            await self._has_news.wait()

    @contextlib.contextmanager
    def asking(self, make: Callable[[int], Ask], name: str = "") -> Iterator[Asked]:
        """Asks the launcher something of the library, and yields the answer. At the end of the block, nobody waits for
        it any more.

        make: makes the message from its ticket; name: of the download whose progress belongs to the answer
        """
        ticket = next(self._tickets)
        asked = Asked(name, self.downloads.get(name))
        if self._writer is None:
            asked.end(Done(ticket, LOST, "not_ready"))
        else:
            self._asked[ticket] = asked
            self._writer.write(frame(make(ticket)))
        try:
            yield asked
        finally:
            if self._asked.pop(ticket, None) is not None and self._writer is not None:
                self._writer.write(frame(Forget(ticket)))

    def use(self, name: str) -> None:
        """Counts a request that computes with a model. Each call needs a call of `release`."""
        self._used[name] += 1
        self._tell()

    def release(self, name: str) -> None:
        asyncio.get_running_loop().call_later(LINGER_S, self._release, name)

    def _release(self, name: str) -> None:
        self._used[name] -= 1
        self._tell()

    @contextlib.contextmanager
    def wanting(self, name: str) -> Iterator[None]:
        """Counts a request that waits for a model, during a `with` block."""
        self._wanted[name] += 1
        self._tell()
        try:
            yield
        finally:
            self._wanted[name] -= 1
            self._tell()

    def order(self, order: Order) -> None:
        if self._writer is not None:
            self._writer.write(frame(order))

    async def reload(self) -> str:
        """Makes the launcher read the table again, and waits for its models. Returns the problem, or "" on success."""
        if self._writer is None:
            return LOST
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reloads.append(answer)
        self._writer.write(frame(Reload()))
        return await answer

    async def sleep(self, asleep: bool) -> str:
        """Makes the launcher unload all models, or wake up, and waits for it. Returns the problem, or "" on success."""
        self.order(Sleep(asleep))
        deadline = time.monotonic() + MOST_SLEEP_WAIT_S
        while self.connected and time.monotonic() < deadline:
            loaded = [name for name, state in self.states.items() if state.state not in ("unloaded", "failed")]
            if self.asleep == asleep and not (asleep and loaded):
                return ""
            await asyncio.sleep(POLL_S)
        return "requests still need some of the models; try again" if self.connected else LOST

    def _tell(self) -> None:
        said = Seen(
            self._version,
            tuple(name for name, count in self._used.items() if count > 0),
            tuple(name for name, count in self._wanted.items() if count > 0),
        )
        if self._writer is not None and said != self._said and self._version:
            self._said = said
            self._writer.write(frame(said))


def _resolve(answer: "asyncio.Future[str]", problem: str) -> None:
    if not answer.done():  # done (cancelled) means that the client has left
        answer.set_result(problem)


# ASGI middleware that keeps the connection of a request alive while the request waits for a model to be loaded.
#
# A stream of server-sent events gets its headers and then comments, `: loading NAME`, so that no proxy takes the
# silence for a dead connection. The first comment comes after some seconds. An error before it gets its usual status;
# an error after it becomes the error event of the stream. If the client disconnects, its request stops waiting. Only
# used where models are loaded on demand.

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
