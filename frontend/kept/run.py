"""A kept answer while this process generates it: the owner of its generation, in place of a connection.

A Run polls the generation and has the format's writer turn the deltas into bytes, as a stream does (server/sse.py). It
hands bytes and tokens to its log, and shows the bytes to its readers when they are written. So a reader never has a
byte that another process could not go on from, however the timing has cut the stream into chunks. If the store fails,
the answer goes on without it, and a comment in the stream says so. What has ended is in the store alone.

Readers come and go. When the last one has left, the generation runs on for `window_s`.

Every byte that a reader gets is a byte of the kept stream, so that it can go on behind it. So when this process stops,
or has lost the answer to another one, its readers get no last event: their streams are cut.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from frontend.errors import BadRequest, Overloaded, SluiceError
from frontend.generation.generation import Generation
from frontend.kept import answers
from frontend.kept.answers import SLICE_BYTES, Arrival, KeptAnswer, Piece, Record
from frontend.kept.database import Connection, StoreError
from frontend.kept.store import Store
from frontend.kept.stream_log import Logs, StreamLog
from frontend.kept.usage import HeldStreams
from frontend.request import Delta
from frontend.server.sse import SERVER_SENT_EVENTS, Framing, StreamWriter

log = logging.getLogger("sluice.frontend")
LINE, BREAK = b"\n", b"\n\n"
COLON = ord(":")  # how a comment begins
COMPLETED, INCOMPLETE, FAILED, CANCELLED = "completed", "incomplete", "failed", "cancelled"
SHUTDOWN = "shutdown"  # the code of the error by which a process that stops ends its generations
MOST_READERS = 64  # of an answer: each token is written to all of them in one turn of the event loop
FIRST_READER_S = 10.0  # the shortest time that a run waits for the reader that has requested it
NOT_KEPT = b": this answer is not kept: %s\n\n"


class Cut(Exception):
    """This process does not go on with an answer; another one does."""


class EventLog:
    """All bytes of a stream as they are sent."""

    def __init__(self, *, numbered: bool) -> None:
        """numbered: whether each event gets a line `id:` with its number"""
        self.length = 0
        self._joined = bytearray()
        self._added: list[bytes] = []  # what follows it
        self._numbered = numbered
        self._count = 0

    @property
    def data(self) -> bytearray:
        """All bytes. What changes them changes `length`, too."""
        if self._added:
            self._joined += b"".join(self._added)
            self._added = []
        return self._joined

    def replace(self, at: int, data: bytes) -> None:
        """Puts these bytes in place of all from `at` on."""
        self.data[at:] = data
        self.length = at + len(data)

    def add(self, data: bytes) -> bytes:
        """Adds whole events, and returns them as they are sent."""
        if self._numbered:
            # nearly always it is one event; most have one line, and a single byte is found faster than two
            one = data.find(LINE) == len(data) - len(BREAK) or data.count(BREAK) == 1
            if one and data[0] != COLON:
                data = b"id: %d\n%b" % (self._count, data)
                self._count += 1
            else:
                data = b"".join(map(self._event, data.split(BREAK)[:-1]))
        self._added.append(data)
        self.length += len(data)
        return data

    def _event(self, block: bytes) -> bytes:
        if block.startswith(b":"):
            return block + BREAK
        self._count += 1
        return b"id: %d\n%s\n\n" % (self._count - 1, block)

    def restore(self, data: bytes) -> None:
        """Adds bytes that were sent before."""
        self._count += sum(not block.startswith(b":") for block in data.split(BREAK)[:-1])
        self._added.append(data)
        self.length += len(data)


async def offset_after(slices: AsyncIterator[bytes], number: int, *, name: str) -> int:
    """Returns the offset behind event `number` of a stream. -1 stands before the first event.

    slices: the bytes of the stream. All are read, so that what is damaged is found before any is shown
    name: the field that says so. Raises BadRequest if there is no such event: no client can have it.
    """
    asked = number
    at, rest = 0, b""
    async for data in slices:
        *blocks, rest = (rest + data).split(BREAK)
        for block in blocks:
            if number < 0:
                break
            number -= not block.startswith(b":")
            at += len(block) + len(BREAK)
    if number >= 0:
        raise BadRequest(
            f"`{name}` is {asked}, but the stream has {asked - number} events", param=name, code="out_of_range"
        )
    return at


@dataclass(frozen=True, slots=True)
class Manner:
    """How an answer is kept.

    logged: whether its stream is written to the store while it is generated, so that any process can go on with it
    keeps: whether it is written at all; else only its request needed the store
    window_s: how long it is generated without a reader; None: to its end
    keepalive_s: after this many seconds of silence a comment is added to the stream
    """

    logged: bool
    keeps: bool
    window_s: float | None
    keepalive_s: float
    framing: Framing


class Run:
    """One answer. `shown` counts the bytes that readers may have; `over` says that there will be no more."""

    def __init__(
        self,
        store: Store,
        logs: Logs,
        log: StreamLog,
        answer: KeptAnswer,
        generation: Generation,
        writer: StreamWriter,
        stream_error: Callable[[Exception], bytes],
        manner: Manner,
        held: HeldStreams,
        gone: "Callable[[Run], None]",
    ) -> None:
        """
        log: what was current before the answer was written to the store, or claimed
        held: counts the bytes of the stream while they are in memory
        gone: called when the run is over and nobody reads it
        """
        self.answer, self.generation, self.manner = answer, generation, manner
        self.shown, self.begun, self.over = 0, False, False
        self.cut = False  # whether another process goes on with the answer
        self.problem = ""  # why the answer is not kept
        # writes more, in the transaction in which a response that succeeded is written
        self.also: Callable[[Connection, bytes], None] | None = None
        self.response = b""  # the finished response of an answer that is listed
        self._store, self._logs, self.log = store, logs, log
        self._writer, self._stream_error = writer, stream_error
        self._held, self._counted, self._is_gone = held, 0, gone
        self._events = EventLog(numbered=answer.stream_id is not None and manner.framing is SERVER_SENT_EVENTS)
        self._only = generation.choices[0].stream if len(generation.choices) == 1 else None
        self._number = 0  # of the next record
        self._latest: Record | None = None  # what was written last
        self._closing = False  # whether the last bytes are made
        self._readers = 0
        self._watchers: tuple[Callable[[], None], ...] = ()  # called when there is more to read
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.TimerHandle | None = None
        self._written_at = time.monotonic()
        self._silence: asyncio.TimerHandle | None = None

    # before the first byte

    def restore(self, pieces: Sequence[Piece]) -> None:
        """Takes the bytes that another process had written."""
        for piece in pieces:
            self._events.restore(piece.data)
            self._count(len(piece.data))
            self._number = piece.number + 1
        self.shown = self._events.length

    def replay(self, pieces: Sequence[Piece]) -> None:
        """Brings the writer to where another process had left it. Raises ValueError if the tokens are others now."""
        for arrivals in (arrivals for piece in pieces for arrivals in piece.writes):
            replayed = map(self._replayed, arrivals)
            self._writer.write([delta for delta in replayed if delta is not None])

    def _replayed(self, arrival: Arrival) -> Delta | None:
        index, ids, ended = arrival
        stream = self.generation.choices[index].stream
        if stream.output[stream.gathered : stream.gathered + len(ids)] != ids or (ended and stream.end is None):
            raise ValueError("the answer cannot be continued: it was computed anew, and became another")
        return self.generation.replay(index, len(ids), ended=ended)

    def refuse(self, error: SluiceError) -> None:
        """Ends the answer with an error in place of `begin`. What was computed anew is not shown."""
        self.generation.close("error")
        self._close(self._stream_error(error), [], FAILED)

    def begin(self) -> None:
        self.begun = True
        self.generation.on_ready(self._on_ready)
        if self.manner.window_s is not None:
            self._leaving = self._loop.call_later(max(self.manner.window_s, FIRST_READER_S), self.cancel)
        if self.manner.framing.keep_alive:
            self._check_silence()

    @property
    def logged(self) -> bool:
        """Whether its stream is in the log of this process, and goes on there."""
        return self.manner.logged and not self.problem and not self.cut

    # readers

    @contextmanager
    def reading(self, watcher: Callable[[], None]) -> Iterator[None]:
        """Counts the caller as a reader inside a `with` block.

        watcher: called in the event loop when there is more to read, or the run is over

        Raises Overloaded if MOST_READERS read already.
        """
        if self._readers >= MOST_READERS:
            raise Overloaded(
                f"{MOST_READERS} clients read this answer already", code="too_many_readers", retry_after=1.0
            )  # fmt: skip
        self._readers += 1
        self._watchers = (*self._watchers, watcher)
        if self._leaving is not None:
            self._leaving.cancel()
        try:
            yield
        finally:
            self._readers -= 1
            self._watchers = tuple(one for one in self._watchers if one is not watcher)
            if not self._readers:
                self._wait_for_readers()

    async def read(self, offset: int) -> AsyncIterator[bytes]:
        """Yields the stream's bytes from `offset` on, as they come. Raises Cut if another process goes on with it."""
        changed = asyncio.Event()
        with self.reading(changed.set):
            while True:
                changed.clear()
                if data := self.since(offset):
                    offset += len(data)
                    yield data
                elif self.cut:
                    raise Cut
                elif self.over:
                    return
                else:
                    await changed.wait()

    def since(self, offset: int) -> bytes:
        """Returns bytes from `offset` on that readers may have: a slice, so that slow readers take little memory."""
        latest = self._latest
        if latest is not None and latest.at == offset and offset + len(latest.data) == self.shown:
            return latest.data  # a reader that keeps up
        return bytes(memoryview(self._events.data)[offset : min(self.shown, offset + SLICE_BYTES)])

    async def finished(self) -> bytes:
        """Returns the response when the answer is over; empty if it has none."""
        changed = asyncio.Event()
        with self.reading(changed.set):
            while not self.over:
                changed.clear()
                await changed.wait()
            return self.response

    def _wait_for_readers(self) -> None:
        if self.over:
            self._gone()
        elif self.manner.window_s is not None:
            self._leaving = self._loop.call_later(self.manner.window_s, self.cancel)

    # the generation

    def cancel(self, reason: str = "client") -> None:
        """Ends the answer."""
        if not self._closing:
            self.generation.close(reason)
            self._close(b"", [], CANCELLED)

    def _on_ready(self) -> None:
        if self._closing:
            return
        arrivals, deltas = self._polled()
        error: Exception | None = None
        data = b""
        try:
            data = self._writer.write(deltas)
            if self.generation.ended:
                error = self.generation.error
                data += self._writer.end() if error is None else self._stream_error(error)
        except Exception as exc:
            error = exc
            data += self._stream_error(exc)
            self.generation.close("error")
        if error is None and not self.generation.ended:
            if not self._held.fits(self.answer.tenant, len(data)):
                self.generation.close("error")
                self._close(self._stream_error(self._held.full()), [], FAILED)
            elif data or arrivals:
                self._add(data, arrivals)
        elif getattr(error, "code", "") == SHUTDOWN and self.manner.logged and not self.problem:
            self._release()
        else:
            self._close(data, arrivals, COMPLETED if error is None else FAILED)

    def _polled(self) -> tuple[list[Arrival], list[Delta]]:
        if (stream := self._only) is not None:
            at, ended = stream.gathered, stream.end is not None
            deltas = self.generation.poll()
            ids = stream.output[at:]
            return [(0, ids, ended)] if ids or ended else [], deltas
        waiting = [
            (index, choice.stream, choice.stream.gathered, choice.stream.end is not None)
            for index, choice in enumerate(self.generation.choices)
            if not choice.done and choice.stream.fresh
        ]
        deltas = self.generation.poll()
        arrivals = [(index, stream.output[at : stream.gathered], ended) for index, stream, at, ended in waiting]
        return [one for one in arrivals if one[1] or one[2]], deltas

    def _add(self, data: bytes, arrivals: list[Arrival]) -> None:
        at, number = self._events.length, self._number
        made = self._append(data)
        if not self.manner.logged or self.problem:
            self._show(at + len(made))
            return
        answer = self.answer
        self.log.add(Record(answer.id, answer.epoch, number, at, made, arrivals), self)
        if not number and answer.response:
            self._store.post(partial(answers.begun, id=answer.id, epoch=answer.epoch), ignored)

    def _append(self, data: bytes) -> bytes:
        self._written_at = time.monotonic()
        self._number += 1
        made = self._events.add(data)
        self._count(len(made))
        return made

    def _count(self, size: int) -> None:
        self._counted += size
        self._held.add(self.answer.tenant, size)

    def _gone(self) -> None:
        """The run is over, and nobody reads it any more."""
        self.generation.detach()
        self._held.remove(self.answer.tenant, self._counted)
        self._counted = 0
        self._is_gone(self)

    def committed(self, record: Record, owned: bool, error: StoreError | None) -> None:
        """The log has written a record, or has failed to (LogUser)."""
        if self.cut or self.over:
            return
        if error is None and (owned or self.problem):
            self._latest = record
            self._show(record.at + len(record.data))
        elif self._closing:  # the end has all bytes, and says whether they are kept
            return
        elif error is None:
            self._release()
        elif self.answer.background:
            self._wait_for_store(error)
        else:
            self._not_kept(error)
            self._show(record.at + len(record.data))

    def _wait_for_store(self, error: StoreError) -> None:
        """Leaves an answer in the background, which is nowhere but in the store, until the store can be written."""
        log.error("answer %s waits for the store: %s", self.answer.id, error.message)
        self._release()

    def _show(self, length: int) -> None:
        if length > self.shown:
            self.shown = length
        for watcher in self._watchers:
            watcher()

    def _not_kept(self, error: StoreError) -> None:
        """Goes on without the store, from the first write on that failed."""
        if not self.problem:
            self.problem = error.message
            log.error("answer %s is not kept: %s", self.answer.id, error.message)
            self._store.insist(partial(answers.delete, id=self.answer.id))
            if self.manner.framing.keep_alive and not self._closing:
                self._events.add(NOT_KEPT % error.message.encode())
                self._show(self._events.length)

    def disowned(self) -> None:
        """Notes that the store does not have this answer as one of this process."""
        problem = self.log.problem()
        if problem is None or self.answer.background:
            self.lost()
        else:
            self._not_kept(problem)

    def lost(self) -> None:
        """Ends here: the answer was deleted, or another process owns it."""
        if not self.over:
            self._closing = self.cut = True
            self.generation.close("client")
            self._end(self.shown)

    def _release(self) -> None:
        """Leaves the answer to another process, because this one stops, or cannot write."""
        self._closing = self.cut = True
        self.generation.close("shutdown")
        work = partial(self._logs.release, id=self.answer.id, epoch=self.answer.epoch, shown=self.shown)
        self._store.post(work, partial(self._released, work))

    def _released(self, work: Callable[[Connection], None], done: None, error: StoreError | None) -> None:
        if error is not None:
            self._store.insist(work)
        self._end(self.shown)

    def _close(self, data: bytes, arrivals: list[Arrival], status: str) -> None:
        """Writes the end, and only then shows the last bytes."""
        self._closing = True
        found, response = ending(data) if self.answer.response else (status, None)
        self.answer.status = status if found is None else found
        if self.answer.response and status == CANCELLED:
            response = with_fields(self.answer.response, status=CANCELLED)
        if response is not None:
            self.response = response
        at = self._events.length
        last = self._append(data)
        if self.problem:
            self._ended_unkept(at, last)
            return
        stream = Piece(self._number - 1, 0, bytes(self._events.data), []) if self.manner.logged else None
        self._store.post(partial(self._write_end, stream=stream), partial(self._end_committed, at, last))

    def _write_end(self, db: Connection, stream: Piece | None) -> bool:
        """Runs in the store's thread."""
        answer = self.answer
        if self.manner.logged:
            if not answers.end(db, answer.id, answer.epoch, answer.status, self.response, stream):
                return False
        elif self.manner.keeps and answer.status != CANCELLED:
            answer.response, answer.ended, answer.owner = self.response, time.time(), ""
            answers.insert(db, answer)
        if self.also is not None and answer.status in (COMPLETED, INCOMPLETE):
            self.also(db, self.response)
        return True

    def _end_committed(self, at: int, last: bytes, owned: bool, error: StoreError | None) -> None:
        if self.cut:
            return
        if error is None and not owned:
            error = self.log.problem()
        if error is not None and self.answer.background:
            self._wait_for_store(error)
            return
        if error is not None and not self.problem:
            self._not_kept(error)
            if self.manner.framing.keep_alive:  # before the end, after which clients read nothing
                note = NOT_KEPT % error.message.encode()
                self._events.replace(at, note + last)
                at += len(note)
        if self.problem:
            self._ended_unkept(at, last)
        elif not owned:
            self.lost()
        else:
            self._end(self._events.length)

    def _ended_unkept(self, at: int, last: bytes) -> None:
        """Shows the end of an answer that is not kept, whose response says so. last: its last bytes, from `at` on"""
        if self.answer.response:
            self._events.replace(at, unkept(last))
            self.response = with_fields(self.response, store=False) if self.response else b""
        self._end(self._events.length)

    def _end(self, length: int) -> None:
        self.over = True
        for timer in (self._leaving, self._silence):
            if timer is not None:
                timer.cancel()
        self._show(length)
        if not self._readers:
            self._gone()

    def _check_silence(self) -> None:
        silence = time.monotonic() - self._written_at
        if silence >= self.manner.keepalive_s and not self._closing:
            self._add(self.manner.framing.keep_alive, [])
            silence = 0.0
        self._silence = self._loop.call_later(self.manner.keepalive_s - silence, self._check_silence)


def ignored(value: None, error: StoreError | None) -> None:
    """Ignores the result of a write on which nothing depends."""


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Returns the JSON of each event."""
    lines = [line for block in data.split(BREAK) for line in block.split(b"\n") if line.startswith(b"data: {")]
    return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]


def ending(data: bytes) -> tuple[str | None, bytes | None]:
    """Returns status and response of the last event that has a whole response; None if no event has one."""
    for event in reversed(events_of(data)):
        if isinstance(response := event.get("response"), dict):
            return response["status"], msgspec.json.encode(response)
    return None, None


def unkept(data: bytes) -> bytes:
    """Returns events whose responses say that they are not stored."""
    return b"".join(map(_unkept, data.split(BREAK)[:-1]))


def _unkept(block: bytes) -> bytes:
    head, mark, text = block.partition(b"data: ")
    if not mark or not text.startswith(b"{"):
        return block + BREAK
    event = msgspec.json.decode(text)
    if isinstance(event.get("response"), dict):
        event["response"]["store"] = False
    return head + mark + msgspec.json.encode(event) + BREAK


def with_fields(response: bytes, **fields: Any) -> bytes:
    """Returns a response (JSON) with these fields changed."""
    return msgspec.json.encode(msgspec.json.decode(response) | fields)
