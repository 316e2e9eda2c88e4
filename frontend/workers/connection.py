"""The wire to one worker: greets it, submits streams, receives their output, and asks again for what was lost.

Knows ids, offsets and epochs; knows nothing of text, HTTP or other workers. What becomes of a stream whose worker
is lost, or refuses it, the owner decides (fleet.py). Lives in the event loop's thread: ZeroMQ is read through its
file descriptor until it is empty, which costs a tenth of an asyncio-wrapped socket.

    Hello → Welcome      until then nothing is submitted; again after every silence
    Submit → Step        `_unanswered`: submitted again until it is admitted or rejected
    Resync → Step        `_missing`: asked again until the hole in a stream's output is filled
    Lease                each second: which streams this frontend still wants
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from frontend.workers.status import DRAINING, READY, REPORTED, ConnectionState, Readiness, not_ready
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import Address
from shared.codec import decode_event, encode, pack_u32, unpack_u32
from shared.config import WireConfig
from shared.sockets import connect

LEASE_S = 1.0
RETRY_S, LONGEST_RETRY_S = 1.0, 8.0  # until a Submit that nobody answers is sent again; doubles
SILENCE_S = 2.0  # Status comes every 0.25 s; this much silence means that the worker is gone
NO_EPOCH = -1  # epoch of a worker that holds nothing of ours


@dataclass(slots=True)
class WireCounters:
    """What the wire went through, for /metrics."""

    gaps: int = 0
    resyncs: int = 0
    resumed: int = 0
    lost: int = 0
    garbage: int = 0
    moved: int = 0  # of the resumed ones, those that went to another worker


class ConnectionListener(Protocol):
    """Decides what a link only notices."""

    def connected(self, link: "WorkerConnection") -> None:
        """The worker can be used, and has none of `link.streams`: it is a new one, or has given up on us."""

    def connection_lost(self, link: "WorkerConnection") -> None:
        """It does not answer. It may come back with all its streams, or under a new epoch with none."""

    def stream_rejected(self, link: "WorkerConnection", stream: Stream, rejected: m.Rejected) -> None: ...

    def stream_unknown(self, stream: Stream) -> None:
        """Its worker lives, but does not know the stream, which is in no link now."""

    def stream_ended(self, stream: Stream, end: m.End) -> None: ...


class WorkerConnection:
    """Sockets to one worker, and the streams that are there."""

    def __init__(
        self,
        address: Address,
        id: bytes,
        listener: ConnectionListener,
        counters: WireCounters,
        *,
        stall_timeout: float,
    ) -> None:
        self.address = address
        self.status: m.Status | None = None
        self.welcome: m.Welcome | None = None
        self.incompatible = ""  # set by the roster: why this worker does not fit to the others
        self.leaving = False  # set by the roster: it gets nothing new
        self.streams: dict[int, Stream] = {}
        self.epoch = NO_EPOCH  # of the worker that holds our streams
        self.lost_since = time.monotonic()
        self._id = id
        self._listener = listener
        self._counters = counters
        self._stall_timeout = stall_timeout
        self._missing: dict[int, int] = {}  # streams with a hole, and the first frame that can come after it
        self._unanswered: dict[int, tuple[float, float]] = {}  # when to submit again, and the wait after that
        self._last_id = 0  # of those submitted here; ids only grow
        self._orphans: dict[int, Stream] = {}  # released while the worker could not be told: aborted when it is back
        self._seq = 0
        self._nonce = secrets.randbits(48)
        self._heard = 0.0  # last Status
        self._leased = 0.0
        self._requests: zmq.Socket[bytes]
        self._events: zmq.Socket[bytes]

    # life

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]", wire: WireConfig) -> None:
        self._requests = connect(context, zmq.DEALER, self.address.requests, wire, identity=self._id)
        self._events = connect(context, zmq.SUB, self.address.events, wire)
        self._events.subscribe(m.BROADCAST)
        self._events.subscribe(self._id)
        asyncio.get_running_loop().add_reader(self._events.fileno(), self._receive)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._events.fileno())
        self._requests.close(linger=200)
        self._events.close(linger=0)

    @property
    def state(self) -> ConnectionState:
        if self.status is None:
            return ConnectionState.CONNECTING
        if self.status.state is not m.WorkerState.READY:
            return REPORTED[self.status.state]
        if self.welcome is None:
            return ConnectionState.LOST if self._silent() else ConnectionState.HANDSHAKE
        if self.incompatible:
            return ConnectionState.INCOMPATIBLE
        if self.leaving:
            return ConnectionState.LEAVING
        return ConnectionState.STALLED if self.stalled else ConnectionState.READY

    @property
    def readiness(self) -> Readiness:
        """Whether new requests can be served now and, if not, why."""
        match self.state:
            case ConnectionState.READY:
                return READY
            case ConnectionState.DRAINING:
                return DRAINING
            case ConnectionState.CONNECTING:
                return not_ready("no worker yet")
            case ConnectionState.LOADING:
                return not_ready(_loading(self.status))
            case ConnectionState.FAILED:
                return not_ready(f"the worker failed: {self.status.error if self.status else ''}")
            case ConnectionState.LOST:
                return not_ready("worker lost")
            case ConnectionState.HANDSHAKE:
                return not_ready("greeting the worker")
            case ConnectionState.INCOMPATIBLE:
                return not_ready(self.incompatible)
            case ConnectionState.LEAVING:
                return not_ready("leaving")
            case ConnectionState.STALLED:
                return not_ready(f"stalled: the last step was {self._age():.0f} s ago")

    def __repr__(self) -> str:
        state = f"{self.state.name}, epoch {self.epoch}, {len(self.streams)} streams"
        return f"<WorkerConnection [{self.address.name}, {state}]>"

    @property
    def stalled(self) -> bool:
        """It is there, but its compute loop has not turned for too long."""
        return self.status is not None and self.welcome is not None and self._age() > self._stall_timeout

    def _age(self) -> float:
        """Seconds since its compute loop last turned, as far as it is known."""
        said = self.status.last_step_age_s if self.status else 0.0
        return said + max(0.0, time.monotonic() - self._heard - SILENCE_S)

    def _silent(self) -> bool:
        return time.monotonic() - self._heard > SILENCE_S

    # streams

    def submit(self, stream: Stream) -> bool:
        """Send its `submit`, again and again until it is answered. False when there is no connection now."""
        self.streams[stream.id] = stream
        self._last_id = stream.id
        self._unanswered[stream.id] = time.monotonic() + RETRY_S, 2 * RETRY_S
        return self._send(stream.submit)

    def release(self, streams: Iterable[Stream]) -> None:
        """Abort these there; they are the caller's again. Never blocks: a worker that is away hears of it on return."""
        gone = {stream.id: stream for stream in streams if self.streams.pop(stream.id, None) is not None}
        if not gone:
            return
        if self.welcome is None or self.stalled:
            self._orphans |= gone
        self._send(m.Abort(tuple(gone)))

    def _send(self, message: m.Request) -> bool:
        """False when there is no connection; the tick repairs that."""
        try:
            self._requests.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # time

    def tick(self, now: float) -> None:
        """To be called ten times a second, with `time.monotonic()`."""
        self._receive()
        self._keep_alive(now)
        self._missing = {id: seq for id, seq in self._missing.items() if id in self.streams}
        for id in self._missing:
            self._ask(self.streams[id])
        self._submit_again(now)

    def _keep_alive(self, now: float) -> None:
        if self.welcome is not None and (self._silent() or not self._connected()):
            self._lose(now)
        if self.welcome is None:
            self._send(m.Hello(self._nonce, os.getpid(), host=socket.gethostname()))
            return
        if self._orphans and not self.stalled:
            self._abort_orphans()
        if now - self._leased > LEASE_S:
            self._leased = now
            self._send(m.Lease(len(self.streams), self._last_id, pack_u32(self.streams)))

    def _connected(self) -> bool:
        """A worker that died closes its end at once; a host that vanished is noticed by its silence."""
        return bool(int(self._requests.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def _lose(self, now: float) -> None:
        self.welcome = None
        self.lost_since = now
        self._listener.connection_lost(self)

    def _abort_orphans(self) -> None:
        """The worker had not died: it does not count as a death, and what was released from it ends there, too."""
        for stream in self._orphans.values():
            stream.deaths.discard((self.address.name, self.epoch))
        if self._orphans:
            self._send(m.Abort(tuple(self._orphans)))
            self._orphans.clear()

    # events

    def _receive(self) -> None:
        """Reads until nothing is left: the descriptor signals edges, not levels."""
        while True:
            try:
                frames = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                event = decode_event(frames[-1])
                self._on_event(event)
            except (msgspec.DecodeError, ValueError):
                self._counters.garbage += 1

    def _on_event(self, event: m.Event) -> None:
        match event:
            case m.Step():
                self._on_step(event)
            case m.Status():
                self._on_status(event)
            case m.Welcome():
                self._on_welcome(event)

    def _on_status(self, status: m.Status) -> None:
        now = time.monotonic()
        self.status, self._heard = status, now
        if self.welcome is not None and status.epoch != self.welcome.epoch:
            self._lose(now)
        if self.welcome is None:
            if status.state is m.WorkerState.READY:
                self._keep_alive(now)
            return
        me = self._id.hex()
        seq = next((peer.seq for peer in status.frontends if peer.id == me), None)
        if seq is None:  # our lease ran out and the worker reaped our requests
            self._forgotten()
            self._lose(now)
        elif seq != self._seq:  # the last frames before this Status were lost, or it has begun to count anew
            self._seq = seq
            self._gap(seq)

    def _on_welcome(self, welcome: m.Welcome) -> None:
        if welcome.nonce != self._nonce or self.welcome is not None:
            return
        if welcome.epoch == self.epoch and welcome.seq < self._seq:
            self._forgotten()  # while we could not hear it
        same = welcome.epoch == self.epoch
        self.welcome, self._seq = welcome, welcome.seq
        if same:
            self._abort_orphans()
            self._resync_all(welcome.seq)
            return
        self._orphans.clear()
        self._listener.connected(self)
        self.epoch = welcome.epoch

    def _forgotten(self) -> None:
        """The worker has given up on this frontend, and with it on all its streams."""
        self.epoch = NO_EPOCH
        self._orphans.clear()

    def _on_step(self, step: m.Step) -> None:
        if step.epoch != self.epoch:
            return
        if step.seq > self._seq:
            self._gap(step.seq)
        self._seq = max(self._seq, step.seq + 1)
        for admitted in step.admitted:
            self._unanswered.pop(admitted.id, None)
            if stream := self.streams.get(admitted.id):
                stream.acknowledged = True
                if not stream.admission.done():
                    stream.seed = admitted.seed
                    stream.admission.set_result(admitted.seed)
        for rejected in step.rejected:
            if refused := self.streams.pop(rejected.id, None):
                self._listener.stream_rejected(self, refused, rejected)
        for started in step.started:
            if stream := self.streams.get(started.id):
                stream.started = started.timings
        for logprobs in step.logprobs:
            if stream := self.streams.get(logprobs.id):
                stream.take_logprobs(logprobs)
        if step.ids:
            self._take_tokens(step)
        for end in step.ends:
            self._on_end(end, step.seq)
        for unknown in step.unknown:
            if unknown not in self._unanswered and (stream := self.streams.pop(unknown, None)):
                self._listener.stream_unknown(stream)

    def _take_tokens(self, step: m.Step) -> None:
        tokens = unpack_u32(step.tokens).tolist()
        streams, missing, at = self.streams, self._missing, 0
        for id, start, count in zip(
            unpack_u32(step.ids), unpack_u32(step.starts), unpack_u32(step.counts), strict=True
        ):
            run = tokens[at : at + count]
            at += count
            stream = streams.get(id)
            if stream is None:
                continue
            if not stream.take(start, run):
                self._resync(stream, step.seq + 1)
            elif missing and step.seq >= missing.get(id, 0):  # a late frame from before the hole fills nothing
                missing.pop(id, None)

    def _on_end(self, end: m.End, seq: int) -> None:
        stream = self.streams.get(end.id)
        if stream is None:
            return
        if end.tokens > len(stream.output):
            self._resync(stream, seq + 1)
            return
        del self.streams[end.id]
        self._listener.stream_ended(stream, end)

    # repair

    def _gap(self, seq: int) -> None:
        """Of the frames before `seq` some are missing."""
        self._counters.gaps += 1
        self._resync_all(seq)

    def _resync_all(self, seq: int) -> None:
        for stream in list(self.streams.values()):
            self._resync(stream, seq)

    def _resync(self, stream: Stream, seq: int) -> None:
        """Ask for what is missing, and go on asking (see tick) until a frame from `seq` on continues what is here."""
        self._missing[stream.id] = max(seq, self._missing.get(stream.id, 0))
        self._ask(stream)

    def _ask(self, stream: Stream) -> None:
        if stream.may_resync(time.monotonic()):
            self._counters.resyncs += 1
            unanswered = stream.id in self._unanswered  # perhaps it never arrived
            self._send(stream.submit if unanswered else m.Resync(stream.id, len(stream.output)))

    def _submit_again(self, now: float) -> None:
        """What was not answered. A worker that gets a Submit twice answers twice and runs it once."""
        if self.welcome is None:
            return
        for id, (due, pause) in list(self._unanswered.items()):
            if id not in self.streams:
                del self._unanswered[id]
            elif due < now:
                self._unanswered[id] = now + pause, min(2 * pause, LONGEST_RETRY_S)
                self._send(self.streams[id].submit)


def _loading(status: m.Status | None) -> str:
    if status is None:
        return ""
    if status.state is m.WorkerState.DOWNLOADING:
        return f"downloading {status.progress:.0%}"
    return f"loading {status.progress:.0%}" if status.progress < 1 else "loaded, preparing to compute"
