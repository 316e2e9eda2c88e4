"""The connection to one worker: handshake, submits, output, leases, and repair of what was lost on the way.

Knows ids, offsets and epochs; nothing of text, HTTP or other workers. The listener (pool.py) decides what happens to a
stream whose worker is lost or rejects it. A connection lives in the event loop's thread: when the descriptor of its
ZeroMQ socket signals, it reads the socket until nothing is left, at a tenth of the cost of an asyncio-wrapped socket.

    Hello → Welcome      the handshake, again after every silence; nothing is submitted before the Welcome
    Submit → Step        `_unanswered`: sent again until the stream is admitted or rejected
    Resync → Step        `_missing`: sent again until the gap in a stream's output is filled
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

from frontend.workers.status import REPORTED, ConnectionState, Readiness, readiness_of
from frontend.workers.stream import Stream
from shared import messages as m
from shared.address import Address
from shared.config.settings import WireConfig
from shared.wire import connect, decode_event, encode, pack_u32, unpack_u32

# The events that a connection reports to its listener, and the counters of all connections for /metrics.


@dataclass(slots=True)
class ConnectionCounters:
    """Events of all connections since the process started."""

    gaps: int = 0  # gaps in the sequence numbers of a worker's frames
    resyncs: int = 0  # streams whose output was requested again
    resumed: int = 0  # streams submitted again after their worker was lost
    moved: int = 0  # resumed streams that went to another worker
    lost: int = 0  # streams that could not be resumed
    garbage: int = 0  # frames that could not be decoded
    # Streams whose prompt was given to a prefill worker, by how that ended; see remote_prefill.py.
    prefill_done: int = 0
    prefill_failed: int = 0
    prefill_lost: int = 0
    prefill_late: int = 0
    prefill_refused: int = 0
    prefill_ended: int = 0


class ConnectionListener(Protocol):
    """Decides what happens to streams when their connection changes; the pool implements it."""

    def reported(self, connection: "WorkerConnection", status: m.Status) -> None:
        """Called with each Status that arrives."""

    def connected(self, connection: "WorkerConnection") -> None:
        """Called when the worker can be used but has none of `connection.streams`, because it is new
        or has dropped this frontend."""

    def connection_lost(self, connection: "WorkerConnection") -> None:
        """Called when the worker falls silent. It may return with all streams, or under a new epoch with no stream."""

    def stream_rejected(self, connection: "WorkerConnection", stream: Stream, rejected: m.Rejected) -> None:
        """Called when the worker did not admit the stream, which has left the connection."""

    def stream_unknown(self, stream: Stream) -> None:
        """Called when the worker does not know the stream, which has left the connection."""

    def stream_ended(self, stream: Stream, end: m.End) -> None:
        """Called when the stream is complete and has left the connection."""


LEASE_S = 1.0
RETRY_S, MAX_RETRY_S = 1.0, 8.0  # pause before an unanswered Submit is sent again; doubles each time
SILENCE_S = 2.0  # a worker is lost after this time without a Status; it sends one every 0.25 s
NO_EPOCH = -1  # the `epoch` of a connection whose worker holds none of our streams


class WorkerConnection:
    """Sockets to one worker, and the streams that it computes."""

    def __init__(
        self,
        address: Address,
        id: bytes,
        listener: ConnectionListener,
        counters: ConnectionCounters,
        *,
        stall_timeout: float,
    ) -> None:
        """
        id: the id of this frontend, and the topic under which the worker publishes events for it
        stall_timeout: seconds without progress of the compute loop after which the worker gets nothing new
        """
        self.address = address
        self.status: m.Status | None = None  # the latest Status
        self.welcome: m.Welcome | None = None  # None before the handshake, and after the worker was lost
        self.fingerprint = ""  # from the latest Welcome; stays while the worker is lost
        self.incompatible = ""  # why the worker cannot be used; set by the membership
        self.leaving = False  # whether the worker's address is no longer configured; set by the membership
        self.streams: dict[int, Stream] = {}
        self.epoch = NO_EPOCH  # the epoch of the worker that holds our streams
        self.lost_since = time.monotonic()
        self._id = id
        self._listener = listener
        self._counters = counters
        self._stall_timeout = stall_timeout
        self._missing: dict[int, int] = {}  # id of a stream with a gap → number of the first frame that can fill it
        self._unanswered: dict[int, tuple[float, float]] = {}  # id → time of the next Submit, and the pause after it
        self._last_id = 0  # the id in the latest Submit to this worker; ids only grow
        self._orphans: dict[int, Stream] = {}  # streams released while the worker was away; aborted when it is back
        self._seq = 0  # the sequence number that the next Step should have
        self._nonce = secrets.randbits(48)
        self._heard_at = 0.0  # time of the last Status
        self._leased_at = 0.0  # time of the last Lease
        self._requests: zmq.Socket[bytes]
        self._events: zmq.Socket[bytes]

    def __repr__(self) -> str:
        state = f"{self.state.name}, epoch {self.epoch}, {len(self.streams)} streams"
        return f"<WorkerConnection [{self.address.name}, {state}]>"

    @property
    def role(self) -> m.Role:
        """The role that the worker reports."""
        return self.status.role if self.status else m.Role.BOTH

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

    # state

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
        return readiness_of(self.state, self.status, self.incompatible, self._step_age())

    @property
    def stalled(self) -> bool:
        """Whether the worker answers, but its compute loop has made no progress for too long."""
        return self.status is not None and self.welcome is not None and self._step_age() > self._stall_timeout

    def _step_age(self) -> float:
        """Seconds since the compute loop last made progress, as far as is known."""
        age = self.status.last_step_age_s if self.status else 0.0
        return age + max(0.0, time.monotonic() - self._heard_at - SILENCE_S)

    def _silent(self) -> bool:
        return time.monotonic() - self._heard_at > SILENCE_S

    # streams

    def submit(self, stream: Stream) -> bool:
        """Sends the stream's `submit`, repeatedly until it is answered. Returns False if there is no connection now."""
        self.streams[stream.id] = stream
        self._last_id = stream.id
        self._unanswered[stream.id] = time.monotonic() + RETRY_S, 2 * RETRY_S
        return self._send(stream.submit)

    def reset_prefix_cache(self, nonce: int) -> None:
        self._send(m.ResetPrefixCache(nonce))

    def release(self, streams: Iterable[Stream]) -> None:
        """Aborts streams at the worker and drops them here. Never blocks: an absent worker gets the Abort later."""
        released = {stream.id: stream for stream in streams if self.streams.pop(stream.id, None) is not None}
        if not released:
            return
        if self.welcome is None or self.stalled:
            self._orphans |= released
        self._send(m.Abort(tuple(released)))

    def _send(self, message: m.Request) -> bool:
        """Sends a message. Returns False if there is no connection; `tick` sends again."""
        try:
            self._requests.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # periodic work

    def tick(self, now: float) -> None:
        """Does the periodic work; called ten times a second, with `time.monotonic()`."""
        self._receive()
        self._keep_alive(now)
        self._missing = {id: seq for id, seq in self._missing.items() if id in self.streams}
        for id in self._missing:
            self._send_resync(self.streams[id])
        self._submit_unanswered(now)

    def _keep_alive(self, now: float) -> None:
        if self.welcome is not None and (self._silent() or not self._has_peer()):
            self._lose(now)
        if self.welcome is None:
            self._send(m.Hello(self._nonce, os.getpid(), host=socket.gethostname()))
            return
        if self._orphans and not self.stalled:
            self._abort_orphans()
        if now - self._leased_at > LEASE_S:
            self._leased_at = now
            self._send(m.Lease(len(self.streams), self._last_id, pack_u32(self.streams)))

    def _has_peer(self) -> bool:
        """Whether the socket is connected. A worker that dies closes it at once; a vanished host does not close it."""
        return bool(int(self._requests.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    def _lose(self, now: float) -> None:
        self.welcome = None
        self.lost_since = now
        self._listener.connection_lost(self)

    def _abort_orphans(self) -> None:
        """Aborts the streams that were released while the worker was away. Removes the worker from the `deaths` of
        these streams, because it had not died after all."""
        for stream in self._orphans.values():
            stream.deaths.discard((self.address.name, self.epoch))
        if self._orphans:
            self._send(m.Abort(tuple(self._orphans)))
            self._orphans.clear()

    def _submit_unanswered(self, now: float) -> None:
        """Sends unanswered Submits again. A worker that gets a Submit twice answers both, but runs the request once."""
        if self.welcome is None:
            return
        for id, (due, pause) in list(self._unanswered.items()):
            if id not in self.streams:
                del self._unanswered[id]
            elif due < now:
                self._unanswered[id] = now + pause, min(2 * pause, MAX_RETRY_S)
                self._send(self.streams[id].submit)

    # events

    def _receive(self) -> None:
        """Reads all events that have arrived: the descriptor is edge-triggered, so it does not signal leftovers."""
        while True:
            try:
                frames = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_event(decode_event(frames[-1]))
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
        self.status, self._heard_at = status, now
        self._listener.reported(self, status)
        if self.welcome is not None and status.epoch != self.welcome.epoch:
            self._lose(now)
        if self.welcome is None:
            if status.state is m.WorkerState.READY:
                self._keep_alive(now)
            return
        own_id = self._id.hex()
        seq = next((frontend.seq for frontend in status.frontends if frontend.id == own_id), None)
        if seq is None:  # our lease expired and the worker freed our requests
            self._drop_epoch()
            self._lose(now)
        elif seq != self._seq:  # the last frames before this Status were lost, or the worker counts from zero again
            self._seq = seq
            self._on_gap(seq)

    def _on_welcome(self, welcome: m.Welcome) -> None:
        if welcome.nonce != self._nonce or self.welcome is not None:
            return
        if welcome.epoch == self.epoch and welcome.seq < self._seq:
            self._drop_epoch()  # the worker dropped this frontend while no message got through
        known = welcome.epoch == self.epoch
        self.welcome, self._seq, self.fingerprint = welcome, welcome.seq, welcome.fingerprint
        if known:
            self._abort_orphans()
            self._resync_all(welcome.seq)
            return
        self._orphans.clear()
        self._listener.connected(self)
        self.epoch = welcome.epoch

    def _drop_epoch(self) -> None:
        """Forgets the epoch, as the worker has dropped this frontend and all its streams."""
        self.epoch = NO_EPOCH
        self._orphans.clear()

    def _on_step(self, step: m.Step) -> None:
        if step.epoch != self.epoch:
            return
        if step.seq > self._seq:
            self._on_gap(step.seq)
        self._seq = max(self._seq, step.seq + 1)
        for admitted in step.admitted:
            self._unanswered.pop(admitted.id, None)
            if stream := self.streams.get(admitted.id):
                stream.admitted(admitted.seed, self.fingerprint)
        for rejected in step.rejected:
            if refused := self.streams.pop(rejected.id, None):
                self._listener.stream_rejected(self, refused, rejected)
        for started in step.started:
            if stream := self.streams.get(started.id):
                stream.started = started.timings
        for logprobs in step.logprobs:
            if stream := self.streams.get(logprobs.id):
                stream.add_logprobs(logprobs)
        for pooled in step.pooled:
            if stream := self.streams.get(pooled.id):
                stream.vector = pooled.values
        if step.ids:
            self._on_tokens(step)
        for end in step.ends:
            self._on_end(end, step.seq)
        for id in step.unknown:
            if id not in self._unanswered and (stream := self.streams.pop(id, None)):
                self._listener.stream_unknown(stream)

    def _on_tokens(self, step: m.Step) -> None:
        tokens = unpack_u32(step.tokens).tolist()
        streams, missing, at = self.streams, self._missing, 0
        for id, start, count in zip(
            unpack_u32(step.ids), unpack_u32(step.starts), unpack_u32(step.counts), strict=True
        ):
            new = tokens[at : at + count]
            at += count
            stream = streams.get(id)
            if stream is None:
                continue
            if not stream.add_tokens(start, new):
                self._resync(stream, step.seq + 1)
            elif missing and step.seq >= missing.get(id, 0):  # a frame older than the gap cannot fill it
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

    def _on_gap(self, seq: int) -> None:
        """Requests the missing output of all streams, as frames before number `seq` were lost."""
        self._counters.gaps += 1
        self._resync_all(seq)

    def _resync_all(self, seq: int) -> None:
        for stream in list(self.streams.values()):
            self._resync(stream, seq)

    def _resync(self, stream: Stream, seq: int) -> None:
        """Requests a stream's missing output, again in each `tick` until frame `seq` or a later one continues it."""
        self._missing[stream.id] = max(seq, self._missing.get(stream.id, 0))
        self._send_resync(stream)

    def _send_resync(self, stream: Stream) -> None:
        if stream.may_resync(time.monotonic()):
            self._counters.resyncs += 1
            unanswered = stream.id in self._unanswered  # the Submit may not have arrived
            self._send(stream.submit if unanswered else m.Resync(stream.id, len(stream.output)))
