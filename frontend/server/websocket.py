"""One WebSocket (RFC 6455) on a connection that began with HTTP: frames, pings, closing. Knows no routes.

http_protocol.py hands the connection over, and goes on to watch its times. wsproto reads the frames. A message arrives
in pieces, which are read as the body of a request is, so it has a body's limits. No more than `MOST_UNREAD` bytes of it
wait here: then nothing more is read from the client, nor while the client does not read what is written to it.
Nothing is compressed, because a few compressed bytes could become gigabytes.
"""

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Message
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage

from frontend.errors import BadRequest

VERSION = "13"
ACCEPT = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3: shows that the server has read the key
KEY_BYTES = 16
MOST_UNREAD = 64 << 10
# Most of one client's bytes that one turn of the event loop handles. The loop reads up to 256 KiB at once: to unmask
# and decode them takes a millisecond, but half a second if they are empty frames.
MOST_BYTES, MOST_FRAMES = 32 << 10, 16
DISCARD_S = 0.01  # pause before more of a message that is ignored is read
CLOSING_S = 1.0  # how long a client may take to answer a Close
NORMAL, GOING_AWAY, NOT_TEXT, TOO_SLOW, TOO_LARGE, LATER = 1000, 1001, 1003, 1008, 1009, 1013


def accepted_key(headers: Headers) -> str:
    """Returns the value of `Sec-WebSocket-Accept`. Raises BadRequest for a key that no client may send."""
    key = headers.get("sec-websocket-key", "")
    try:
        decoded = base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        decoded = b""
    if len(decoded) != KEY_BYTES:
        raise BadRequest("`Sec-WebSocket-Key` must be 16 bytes in base64", code="bad_handshake")
    return base64.b64encode(hashlib.sha1(key.encode() + ACCEPT, usedforsecurity=False).digest()).decode()


class Transport(Protocol):
    """The part of asyncio's transport that a WebSocket needs."""

    def write(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...


class Flow(Protocol):
    """uvicorn's FlowControl."""

    write_paused: bool

    async def drain(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class WebSocket:
    """The server's end of a WebSocket.

    gone: set when the client has closed the connection, or is lost
    reason: why the server cut the connection off; "": it did not
    """

    def __init__(self, transport: Transport, flow: Flow, reason: Callable[[], str]) -> None:
        self.gone = asyncio.Event()
        self.reason = reason
        self.stopping = ""  # why no further message is read: "limit" or "shutdown"; "": messages are read
        self._transport, self._flow = transport, flow
        self._wire = Connection(ConnectionType.SERVER)
        self._data = bytearray()  # the part of the current message that has arrived and was not read yet
        self._begun = False  # whether there is a current message: one that has begun and was not read to its end
        self._finished = False  # whether the current message has arrived to its end
        # replaced by new objects when a message begins, and when bytes of the client arrive: see phase()
        self._message = self._heard = object()
        self._pinged = False  # whether a ping was sent, and no byte of the client has arrived since
        self._deaf = False  # whether the rest of a message that is too large is being ignored
        self._unanswered: Ping | None = None
        self._raw = bytearray()  # bytes that have arrived and that `_wire` does not have yet
        self._parsed = True  # whether all frames of the bytes that `_wire` has are handled
        self._goes_on = False  # whether the next turn of the event loop is to handle more frames
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # for the route

    async def message(self) -> bool:
        """Waits until a message begins. Returns False if none is to be read any more."""
        while not (self._begun or self._over or self.stopping):
            await self._change()
        return not (self._over or self.stopping)

    async def receive(self) -> Message:
        """Returns the next piece of the message, in the form of ASGI's pieces of a body."""
        while not (self._data or self._finished or self._over):
            await self._change()
        if self._over:
            return {"type": "http.disconnect"}
        data, finished = bytes(self._data), self._finished
        self._data.clear()
        if finished:
            self._begun = self._finished = False
        self._parse_soon()
        return {"type": "http.request", "body": data, "more_body": not finished}

    def ready(self) -> bool:
        """Whether the client reads as fast as the server writes."""
        return not (self._flow.write_paused or self._over)

    async def drain(self) -> None:
        """Waits until the client has read most of what was written to it."""
        if self._flow.write_paused and not self._over:
            await self._flow.drain()

    def send(self, messages: Iterable[bytes]) -> None:
        """Sends texts, each as one message. Drops them if the connection is closed."""
        if not self._over:
            texts = [self._wire.send(TextMessage(message.decode())) for message in messages]
            self._transport.write(b"".join(texts))

    def ping(self) -> None:
        if not self._over:
            self._transport.write(self._wire.send(Ping()))

    def stop(self, why: str) -> None:
        """Ends reading between two messages."""
        self.stopping = self.stopping or why
        self._changed.set()

    def close(self, code: int, reason: str) -> None:
        """Closes the connection, when the client has answered or after CLOSING_S."""
        if self._over:
            return
        self._transport.write(self._wire.send(CloseConnection(code, reason)))
        self._deaf = self._begun and not self._finished
        self._end()
        self._parse_soon()

    # called by the connection

    def feed(self, data: bytes) -> None:
        if self.gone.is_set() or self._deaf:
            self._flow.pause_reading()  # else the event loop reads on and on, and does nothing for others
            self._loop.call_later(DISCARD_S, self._resume)
            return
        self._heard, self._pinged = object(), False
        self._raw += data
        if not self._goes_on:
            self._parse()

    def lost(self) -> None:
        self.gone.set()
        self._changed.set()

    def writable(self) -> None:
        """The client has read most of what was written to it."""
        self._parse_soon()

    def phase(self) -> tuple[str, object]:
        """Returns the phase, and an object that is replaced when the client has made progress."""
        if self._over:
            return "closing", None
        arriving = self._begun and not self._finished
        return ("request", self._message) if arriving else ("idle", self._heard)

    def late(self) -> None:
        """A message has not arrived in time."""
        self.close(TOO_SLOW, "the message did not arrive in time")

    def silent(self) -> None:
        """Called when the client was silent for `idle_s`: sends a ping; the second time, ends the connection."""
        if self._pinged or self._over:
            self._transport.abort()
        else:
            self._pinged, self._heard = True, object()
            self.ping()

    # frames

    @property
    def _over(self) -> bool:
        return self.gone.is_set() or self._wire.state is not ConnectionState.OPEN

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _parse_soon(self) -> None:
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._parse)

    def _parse(self) -> None:
        """Handles some of what has arrived, as long as no more is to be read than may wait."""
        self._goes_on = False
        if self.gone.is_set():
            return self._changed.set()
        if self._is_full():
            return self._flow.pause_reading()
        if self._parsed:
            self._wire.receive_data(bytes(self._raw[:MOST_BYTES]))
            del self._raw[:MOST_BYTES]
        self._parsed = True
        for frames, event in enumerate(self._wire.events(), 1):
            self._handle(event)
            if frames == MOST_FRAMES or self._is_full():
                self._parsed = False
                break
        if self._unanswered is not None and not self._over:
            self._transport.write(self._wire.send(self._unanswered.response()))
        self._unanswered = None
        if self._is_full():
            self._flow.pause_reading()
        elif self._raw or not self._parsed:
            self._flow.pause_reading()
            self._parse_soon()
        else:
            self._resume()
        self._changed.set()

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._flow.resume_reading()

    def _is_full(self) -> bool:
        return not self._over and (self._finished or len(self._data) > MOST_UNREAD or self._flow.write_paused)

    def _handle(self, event: Event) -> None:
        match event:
            case CloseConnection():  # the client closes, has answered a Close, or has broken the protocol
                if self._wire.state in (ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING):
                    self._transport.write(self._wire.send(event.response()))
                self.gone.set()
                self._end()
            case _ if self._over:
                return  # what comes behind the server's own Close
            case Ping():
                self._unanswered = event  # only the last one of several needs an answer (RFC 6455, 5.5.3)
            case TextMessage(data=text):
                if not self._begun:
                    self._begun, self._message = True, object()
                self._data += text.encode()
                self._finished = event.message_finished
            case BytesMessage():
                self.close(NOT_TEXT, "messages must be text")

    def _end(self) -> None:
        """Closes the connection: immediately if the client has answered the Close, else after CLOSING_S.

        A client that still sends would lose the Close: closing a socket with unread input resets the connection.
        """
        if self._wire.state is ConnectionState.CLOSED:
            self._transport.close()
        else:
            self._loop.call_later(CLOSING_S, self._transport.close)
