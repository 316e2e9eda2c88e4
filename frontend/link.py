"""The frontend's end of the wire: submits, listens, notices what was lost and has it repaired.

Knows ids, offsets and epochs; knows nothing of text or HTTP. Lives in the event loop's thread: ZeroMQ is read
through its file descriptor and drained, which costs a tenth of an asyncio-wrapped socket.

A worker that comes back under a new epoch is given every live stream again, with what was already received.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import zmq

from frontend.errors import Overloaded, SluiceError, Unprocessable
from frontend.stream import Stream
from shared import messages as m
from shared.codec import decode_event, encode, pack_u32, unpack_u32
from shared.config import WireConfig
from shared.sockets import connect

TICK_S = 0.1
LEASE_S = 1.0
SILENCE_S = 2.0  # Status comes every 0.25 s; this much silence means that the worker is gone


@dataclass(slots=True)
class Counts:
    """What the wire went through, for /metrics."""

    gaps: int = 0
    resyncs: int = 0
    resumed: int = 0
    lost: int = 0
    garbage: int = 0


class Link:
    """Sockets to one worker, and the streams that live on it."""

    def __init__(self, wire: WireConfig, *, stall_timeout: float = 30.0, recovery_timeout: float = 120.0) -> None:
        self.id = secrets.token_bytes(m.TOPIC_BYTES)
        self.status: m.Status | None = None
        self.welcome: m.Welcome | None = None
        self.counts = Counts()
        self._wire = wire
        self._stall_timeout = stall_timeout
        self._recovery_timeout = recovery_timeout
        self._streams: dict[int, Stream] = {}
        self._missing: set[int] = set()  # streams with a hole
        self._next_id = 1
        self._seq = 0
        self._epoch = -1  # of the worker that holds our streams
        self._nonce = secrets.randbits(48)
        self._heard = 0.0  # last Status
        self._lost_since = 0.0
        self._leased = 0.0
        self._context = zmq.Context()
        self._requests: zmq.Socket[bytes]
        self._events: zmq.Socket[bytes]
        self._ticker: asyncio.Task[None] | None = None

    # life

    async def start(self) -> None:
        self._requests = connect(self._context, zmq.DEALER, self._wire.requests, self._wire, identity=self.id)
        self._events = connect(self._context, zmq.SUB, self._wire.events, self._wire)
        self._events.subscribe(m.BROADCAST)
        self._events.subscribe(self.id)
        self._lost_since = time.monotonic()
        asyncio.get_running_loop().add_reader(self._events.fileno(), self._drain)
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Ends what still lives with `shutdown`."""
        for stream in list(self._streams.values()):
            self._end(stream, m.Outcome.SHUTDOWN, "the server is shutting down")
        if self._ticker is None:
            return
        self._ticker.cancel()
        self._ticker = None
        asyncio.get_running_loop().remove_reader(self._events.fileno())
        self._requests.close(linger=200)
        self._events.close(linger=0)
        self._context.term()

    def state(self) -> tuple[bool, str]:
        """Whether requests can be served now and, if not, why."""
        status = self.status
        if status is None:
            return False, "no worker yet"
        if status.state == "loading":
            return False, f"loading {status.progress:.0%}"
        if status.state == "draining":
            return False, "draining"
        if status.state == "failed":
            return False, f"the worker failed: {status.error}"
        if self.welcome is None:
            return False, "worker lost" if self._silent() else "greeting the worker"
        age = status.last_step_age_s + max(0.0, time.monotonic() - self._heard - SILENCE_S)
        if age > self._stall_timeout:
            return False, f"stalled: the last step was {age:.0f} s ago"
        return True, "ready"

    @property
    def live(self) -> int:
        return len(self._streams)

    # requests

    async def submit(
        self,
        prompt: list[int],
        sampling: m.Sampling,
        *,
        salt: str = "",
        group: int = 0,
        deadline_ms: int = 0,
        priority: int = 0,
        owner: str = "",
    ) -> Stream:
        """Returns when the worker has admitted it.

        Raises:
            Overloaded: queue full, draining, or no worker, with `retry_after` in seconds.
            Unprocessable: the worker refuses this request for good.
        """
        ready, reason = self.state()
        if not ready:
            raise Overloaded(f"not ready: {reason}", code="not_ready", retry_after=1.0)
        message = m.Submit(
            self._next_id, pack_u32(prompt), sampling,
            salt=salt, group=group, deadline_ms=deadline_ms, priority=priority, owner=owner,
        )  # fmt: skip
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        stream = Stream(message, asyncio.get_running_loop().create_future())
        self._streams[stream.id] = stream
        self._send(message)
        try:
            stream.seed = await stream.admission
        except asyncio.CancelledError:
            self.abort([stream])
            raise
        return stream

    def abort(self, streams: Iterable[Stream]) -> None:
        """Never blocks; ended streams are ignored."""
        live = [stream for stream in streams if self._streams.pop(stream.id, None) is not None]
        for stream in live:
            stream.finish(m.End(stream.id, m.Outcome.ABORTED, len(stream.output)))
        if live:
            self._send(m.Abort(tuple(stream.id for stream in live)))

    def _send(self, message: m.Request) -> bool:
        """False when there is no worker to hear it; the tick repairs that."""
        try:
            self._requests.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # time

    async def _tick(self) -> None:
        while True:
            self._drain()
            self._keep_alive(time.monotonic())
            self._missing &= self._streams.keys()
            for id in list(self._missing):
                self._resync(self._streams[id])
            await asyncio.sleep(TICK_S)

    def _keep_alive(self, now: float) -> None:
        if self.welcome is not None and self._silent():
            self._lose(now)
        if self.welcome is None:
            self._send(m.Hello(self._nonce, os.getpid(), host=socket.gethostname()))
            if self._streams and now - self._lost_since > self._recovery_timeout:
                self._give_up()
        elif now - self._leased > LEASE_S:
            self._leased = now
            self._send(m.Lease(len(self._streams)))

    def _silent(self) -> bool:
        return time.monotonic() - self._heard > SILENCE_S

    def _lose(self, now: float) -> None:
        """The worker is gone: what it had not admitted is refused, the rest waits for it."""
        self.welcome = None
        self._lost_since = now
        for stream in [s for s in self._streams.values() if not s.admission.done()]:
            del self._streams[stream.id]
            stream.admission.set_exception(Overloaded("the worker was lost", code="worker_lost", retry_after=1.0))

    def _give_up(self) -> None:
        for stream in list(self._streams.values()):
            self.counts.lost += 1
            self._end(stream, m.Outcome.ERROR, f"the worker did not come back within {self._recovery_timeout:g} s")

    # events

    def _drain(self) -> None:
        """Read everything that is there: the descriptor signals edges, not levels."""
        while True:
            try:
                frames = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                event = decode_event(frames[-1])
                self._on_event(event)
            except (msgspec.DecodeError, ValueError):
                self.counts.garbage += 1

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
            if status.state == "ready":
                self._keep_alive(now)
            return
        me = self.id.hex()
        seq = next((peer.seq for peer in status.frontends if peer.id == me), None)
        if seq is None:  # our lease ran out and the worker reaped our requests: as if it had restarted
            self._epoch = -1
            self._lose(now)
        elif seq > self._seq:  # the last frames before this Status were lost
            self._seq = seq
            self._gap()

    def _on_welcome(self, welcome: m.Welcome) -> None:
        if welcome.nonce != self._nonce or self.welcome is not None:
            return
        if welcome.version != m.PROTOCOL_VERSION:
            return  # state() goes on saying that there is no worker; the worker's log names the versions
        self.welcome, self._seq = welcome, welcome.seq
        if welcome.epoch == self._epoch:
            self._resync_all()
        else:
            self._epoch = welcome.epoch
            self._resume_all()

    def _on_step(self, step: m.Step) -> None:
        if step.epoch != self._epoch:
            return
        if step.seq > self._seq:
            self._gap()
        self._seq = max(self._seq, step.seq + 1)
        for admitted in step.admitted:
            if (stream := self._streams.get(admitted.id)) and not stream.admission.done():
                stream.admission.set_result(admitted.seed)
        for rejected in step.rejected:
            self._on_rejected(rejected)
        for started in step.started:
            if stream := self._streams.get(started.id):
                stream.started = started.timings
        for logprobs in step.logprobs:
            if stream := self._streams.get(logprobs.id):
                stream.take_logprobs(logprobs)
        if step.ids:
            self._take_tokens(step)
        for end in step.ends:
            self._on_end(end)

    def _take_tokens(self, step: m.Step) -> None:
        tokens = unpack_u32(step.tokens).tolist()
        streams, at = self._streams, 0
        for id, start, count in zip(
            unpack_u32(step.ids), unpack_u32(step.starts), unpack_u32(step.counts), strict=True
        ):
            run = tokens[at : at + count]
            at += count
            stream = streams.get(id)
            if stream is None:
                continue
            if stream.take(start, run):
                self._missing.discard(id)
            else:
                self._resync(stream)

    def _on_rejected(self, rejected: m.Rejected) -> None:
        stream = self._streams.pop(rejected.id, None)
        if stream is None:
            return
        if stream.admission.done():  # a resumed stream that the new worker will not have
            self.counts.lost += 1
            stream.finish(m.End(stream.id, m.Outcome.ERROR, len(stream.output), rejected.message))
        else:
            stream.admission.set_exception(_refusal(rejected))

    def _on_end(self, end: m.End) -> None:
        stream = self._streams.get(end.id)
        if stream is None:
            return
        if end.tokens > len(stream.output):
            self._resync(stream)
            return
        del self._streams[end.id]
        if not stream.admission.done():
            stream.admission.set_result(0)
        stream.finish(end)

    def _end(self, stream: Stream, outcome: m.Outcome, error: str) -> None:
        self._streams.pop(stream.id, None)
        if not stream.admission.done():
            stream.admission.set_exception(Overloaded(error, code=outcome.value, retry_after=1.0))
        stream.finish(m.End(stream.id, outcome, len(stream.output), error))

    # repair

    def _gap(self) -> None:
        self.counts.gaps += 1
        self._resync_all()

    def _resync_all(self) -> None:
        for stream in list(self._streams.values()):
            self._resync(stream)

    def _resync(self, stream: Stream) -> None:
        """Ask for what is missing, and go on asking (see _tick) until it is there."""
        self._missing.add(stream.id)
        if stream.may_resync(time.monotonic()):
            self.counts.resyncs += 1
            self._send(m.Resync(stream.id, len(stream.output)))

    def _resume_all(self) -> None:
        for stream in list(self._streams.values()):
            self.counts.resumed += 1
            stream.outlived()
            self._send(_resumed(stream))


def _resumed(stream: Stream) -> m.Submit:
    sampling = stream.submit.sampling
    if stream.admission.done():
        sampling = msgspec.structs.replace(sampling, seed=stream.seed)
    return msgspec.structs.replace(
        stream.submit, sampling=sampling, generated=pack_u32(stream.output), crashes=stream.crashes,
        deadline_ms=stream.deadline_ms,
    )  # fmt: skip


def _refusal(rejected: m.Rejected) -> SluiceError:
    if rejected.reason in (m.Refusal.TOO_LONG, m.Refusal.INVALID):
        return Unprocessable(rejected.message, code=rejected.reason.value)
    return Overloaded(rejected.message, code=rejected.reason.value, retry_after=rejected.retry_after_s)
