"""The worker's end of the wire: an I/O thread that owns both sockets, so that the worker answers while it computes.

The compute loop reads `inbox` and calls `publish`; it never touches a socket and never waits for one. The thread
greets frontends, keeps their leases, broadcasts Status with the age of the loop's last turn, and numbers the frames.

    compute loop ──publish(topic, Step)──► outbox ─┐            ┌─ ROUTER ◄── frontends
                 ◄──inbox, awake─────────────── I/O thread ─────┤
                 ──snapshot, progress──────────►               └─ XPUB  ──► frontends

A frame that a frontend cannot take is dropped and its number skipped: the frontend sees the gap and asks again.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from shared import messages as m
from shared.codec import decode_request, encode
from shared.config import WireConfig
from shared.heartbeat import Heartbeat
from shared.sockets import bind
from worker.transport.auth import Authenticator

log = logging.getLogger("sluice.link")

STATUS_S = 0.2  # between two broadcasts of Status
AT_ONCE = 1000  # most messages of one socket between two looks at the others
MOST_WAITING = 1 << 16  # messages in the inbox; more stay with their senders
MOST_PEERS = 1024
POLL_MS = 100
MOST_OWNED = 1 << 16  # ids in a Lease; one with more only renews


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """A frontend left or fell silent; what it owned is to be freed."""


@dataclass(slots=True)
class FrontendPeer:
    """A frontend, as long as its lease runs."""

    pid: int
    seen: float
    seq: int = 0
    streams: int = 0


@dataclass(slots=True)
class WireServerCounters:
    garbage: int = 0
    dropped: int = 0
    reaped: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """What Welcome tells; complete once the model is loaded."""

    epoch: int
    model: str
    tokenizer_hash: str = ""
    limits: m.Limits | None = None


@dataclass(slots=True)
class WireServer:
    """Start it before loading the model: `/ready` on every frontend then shows progress."""

    wire: WireConfig
    identity: Identity
    lease_timeout: float  # seconds
    snapshot: Callable[[], m.Status]  # called in the I/O thread
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    inbox: deque[tuple[bytes, m.Request | FrontendGone]] = field(default_factory=deque)
    awake: threading.Event = field(default_factory=threading.Event)
    step_progress: Callable[[], int] = lambda: 0  # called in the I/O thread; grows while a step makes progress
    progressed_at: float = field(default_factory=time.monotonic)  # when the compute loop last made progress
    counts: WireServerCounters = field(default_factory=WireServerCounters)
    _peers: dict[bytes, FrontendPeer] = field(default_factory=dict)
    _subscribers: Counter[bytes] = field(default_factory=Counter)  # connections of each topic
    _strangers: deque[bytes] = field(default_factory=lambda: deque(maxlen=64))  # of another protocol's version
    _outbox: deque[tuple[bytes, m.Step]] = field(default_factory=deque)
    _bell: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _layers: int = 0
    _due: float = 0.0  # when the next Status is
    _stop: bool = False
    _thread: threading.Thread | None = None
    _context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    _authenticator: Authenticator | None = None
    _router: zmq.Socket[bytes] = field(init=False)
    _xpub: zmq.Socket[bytes] = field(init=False)

    def totals(self) -> dict[str, int]:
        """For /metrics: what was dropped, what could not be sent, who was refused for an unknown key, who went away."""
        return {
            "wire_garbage": self.counts.garbage,
            "wire_unsent": self.counts.dropped,
            "wire_refused": self._authenticator.refused if self._authenticator is not None else 0,
            "leases_reaped": self.counts.reaped,
        }

    def status(self) -> m.Status:
        """The worker as it is now, with its frontends and the age of its last step; from any thread."""
        peers = tuple(
            m.ConnectedFrontend(id.hex(), peer.pid, peer.streams, peer.seq) for id, peer in list(self._peers.items())
        )
        age = time.monotonic() - self.progressed_at
        return msgspec.structs.replace(self.snapshot(), last_step_age_s=age, frontends=peers)

    # called by the compute loop

    def start(self) -> None:
        """Binds; raises ConfigError when an address is taken or open to strangers."""
        self._authenticator = Authenticator.open(self._context, self.wire)
        self._router = bind(self._context, zmq.ROUTER, self.wire.requests, self.wire)
        self._xpub = bind(self._context, zmq.XPUB, self.wire.events, self.wire)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """The compute loop has made progress."""
        self.progressed_at = time.monotonic()
        self.heartbeat.progress()

    def publish(self, topic: bytes, step: m.Step) -> None:
        """Hand a frame over; its number is given when it is sent."""
        self._outbox.append((topic, step))

    def flush(self) -> None:
        """Wake the I/O thread for what was published."""
        os.eventfd_write(self._bell, 1)

    def refresh(self) -> None:
        """Broadcast Status now: something ended that others wait to see."""
        self._due = 0.0
        self.flush()

    def wait(self, timeout: float) -> None:
        """Until something is in the inbox, or `timeout` seconds."""
        if not self.inbox:
            self.awake.wait(timeout)
        self.awake.clear()

    def close(self) -> None:
        """Sends what was published and a last Status, and ends the thread."""
        self._stop = True
        self.flush()
        if self._thread is not None:
            self._thread.join(timeout=5)
        for sock in (self._router, self._xpub):
            sock.close(linger=500)
        if self._authenticator is not None:
            self._authenticator.socket.close()
        self._context.term()

    # the I/O thread

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._xpub, self._bell):
            poller.register(source, zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        while not self._stop or self._outbox:
            self._beat()
            ready = dict(poller.poll(POLL_MS))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if self._authenticator is not None and self._authenticator.socket in ready:
                self._authenticator.answer()
            self._send_outbox()
            if self._router in ready:
                self._receive_requests()
            if self._xpub in ready:
                self._receive_subscriptions()
            now = time.monotonic()
            if now >= self._due:
                self._due = now + STATUS_S
                self._reap(now)
                self._broadcast()
                if self._authenticator is not None:
                    self._authenticator.refresh()
        self._broadcast()

    def _beat(self) -> None:
        self.heartbeat.alive()
        layers = self.step_progress()
        if layers != self._layers:
            self._layers = layers
            self.progress()

    def _send_outbox(self) -> None:
        while self._outbox:
            topic, step = self._outbox.popleft()
            peer = self._peers.get(topic)
            if peer is not None:
                seq, peer.seq = peer.seq, peer.seq + 1
                self._send(topic, msgspec.structs.replace(step, seq=seq, epoch=self.identity.epoch))

    def _send(self, topic: bytes, event: m.Event) -> None:
        try:
            self._xpub.send_multipart((topic, encode(event)), zmq.NOBLOCK)
        except zmq.Again:
            self.counts.dropped += 1

    def _receive_requests(self) -> None:
        if len(self.inbox) >= MOST_WAITING:
            time.sleep(0.001)
            return
        for _ in range(AT_ONCE):
            try:
                sender, *body = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(sender.bytes, body)

    def _receive(self, sender: bytes, body: list[zmq.Frame]) -> None:
        if self._authenticator is not None and not self._authenticator.knows(body):
            self._forget(sender)
            return
        try:
            request = decode_request(body[-1].buffer)
        except (msgspec.DecodeError, IndexError) as error:
            self._drop(f"cannot read a frame from {sender.hex()}: {error}")
            return
        self._on_request(sender, request)

    def _drop(self, why: str) -> None:
        if self.counts.garbage == 0:
            log.warning("dropped: %s (further ones are only counted)", why)
        self.counts.garbage += 1

    def _on_request(self, sender: bytes, request: m.Request) -> None:
        peer = self._peers.get(sender)
        if peer is not None:
            peer.seen = time.monotonic()
        match request:
            case m.Hello():
                self._greet(sender, request)
            case m.Lease() if peer is not None:
                peer.streams = request.live
                if request.last_id and len(request.ids) % 4 == 0 and len(request.ids) <= 4 * MOST_OWNED:
                    self._hand_over(sender, request)
            case m.Submit() | m.Abort() | m.Resync() if peer is not None:
                self._hand_over(sender, request)
            case _:
                self._drop(f"{type(request).__name__} from {sender.hex()}, which never said Hello")

    def _hand_over(self, sender: bytes, request: m.Request) -> None:
        self.inbox.append((sender, request))
        self.awake.set()

    def _greet(self, sender: bytes, hello: m.Hello) -> None:
        limits = self.identity.limits
        if limits is None:
            return
        if len(sender) != m.TOPIC_BYTES or sender == m.BROADCAST:
            self._drop(f"Hello from {sender.hex()}, which is no frontend's id")
            return
        if sender not in self._peers and len(self._peers) >= MOST_PEERS:
            self._drop(f"Hello from {sender.hex()}, with {MOST_PEERS} frontends here already")
            return
        seq = 0
        if hello.version == m.PROTOCOL_VERSION:
            seq = self._peers.setdefault(sender, FrontendPeer(hello.pid, time.monotonic())).seq
        elif sender not in self._strangers:  # it goes on asking
            self._strangers.append(sender)
            log.warning(
                "frontend %s (process %d on %s) speaks protocol %d, not %d",
                sender.hex(), hello.pid, hello.host, hello.version, m.PROTOCOL_VERSION,
            )  # fmt: skip
        who = self.identity
        self._send(
            sender, m.Welcome(hello.nonce, who.epoch, os.getpid(), who.model, who.tokenizer_hash, limits, seq=seq)
        )

    def _receive_subscriptions(self) -> None:
        for _ in range(AT_ONCE):
            try:
                message = self._xpub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if message[:1] in (b"\0", b"\1") and len(message) == 1 + m.TOPIC_BYTES:
                self._count_subscribers(message[1:], 1 if message[0] else -1)

    def _count_subscribers(self, id: bytes, change: int) -> None:
        """A frontend that has come back over a new connection is not gone when its old one breaks at last."""
        self._subscribers[id] += change
        if self._subscribers[id] <= 0:
            del self._subscribers[id]
            self._forget(id)

    def _reap(self, now: float) -> None:
        silent = [id for id, peer in self._peers.items() if now - peer.seen > self.lease_timeout]
        for id in silent:
            self._forget(id)

    def _forget(self, id: bytes) -> None:
        if self._peers.pop(id, None) is not None:
            self.counts.reaped += 1
            self.inbox.append((id, FrontendGone()))
            self.awake.set()

    def _broadcast(self) -> None:
        self._send(m.BROADCAST, self.status())
