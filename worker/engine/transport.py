"""Connects the worker with the frontends: an I/O thread owns both sockets, so that it answers during a long step.

The compute loop reads `inbox` and calls `publish`; it never touches a socket and never waits for one. The thread
answers handshakes, keeps leases, numbers frames, and broadcasts Status with the age of the loop's last progress.

    compute loop ──publish(topic, Step)──► outbox ─┐            ┌─ ROUTER ◄── frontends
                 ◄──inbox, awake─────────────── I/O thread ─────┤
                 ──snapshot, progress──────────►               └─ XPUB  ──► frontends

If a frontend does not keep up, a frame for it is dropped and its number is skipped. The frontend sees the gap and
resyncs.
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
from shared.config.settings import WireConfig
from shared.heartbeat import Heartbeat
from shared.wire import allowed_keys, bind, decode_request, encode

# Authenticates connections over tcp://. ZeroMQ asks this module to check each connection's public key (ZAP, RFC 27).
#
# It runs in the I/O thread. It reads the folder of allowed keys for every check, so that a key is valid as soon as
# its file exists. ZeroMQ asks only once per connection. If the file of a key is removed later, `is_allowed` rejects
# the messages that still arrive over that connection.

log = logging.getLogger("sluice.transport")
ENDPOINT = "inproc://zeromq.zap.01"
MAX_LOGGED = 64  # how many refused keys are logged, each only once


@dataclass(slots=True)
class Authenticator:
    """Checks the keys of connections. Must be opened before the sockets that it protects are bound."""

    wire: WireConfig
    socket: zmq.Socket[bytes]
    refused: int = 0  # number of refused connections and messages
    _allowed: set[str] = field(default_factory=set)  # the allowed keys at the last refresh()
    _logged: set[bytes] = field(default_factory=set)

    @classmethod
    def open(cls, context: zmq.Context[zmq.Socket[bytes]], wire: WireConfig) -> "Authenticator | None":
        """Opens an authenticator. Returns None if the settings require no keys."""
        if wire.insecure or not wire.requests.startswith("tcp://"):
            return None
        socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ENDPOINT)
        return cls(wire, socket)

    def refresh(self) -> None:
        """Reads the folder of allowed keys. Called a few times a second."""
        self._allowed = {key.decode() for key in allowed_keys(self.wire)}

    def is_allowed(self, frames: list[zmq.Frame]) -> bool:
        """Whether the key of the connection that delivered this message is still allowed."""
        try:
            allowed = bool(frames) and frames[-1].get("User-Id") in self._allowed
        except zmq.ZMQError:
            allowed = False
        self.refused += not allowed
        return allowed

    def answer(self) -> None:
        """Answers all pending requests of ZeroMQ to check a key."""
        from zmq.utils import z85

        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            self.refresh()
            allowed = key.decode() in self._allowed
            if not allowed:
                self._refuse(key, address.decode("ascii", "replace"))
            # After status 300, the handshake times out and the peer retries; after 400, it would not retry.
            verdict = (b"200", b"OK", key) if allowed else (b"300", b"unknown key", b"")
            self.socket.send_multipart((version, request, *verdict, b""))

    def _refuse(self, key: bytes, address: str) -> None:
        self.refused += 1
        if key not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(key)
            log.warning(
                "refused %s: its public key %s is not in the folder allowed/ of --curve-dir", address, key.decode()
            )


STATUS_INTERVAL_S = 0.2
MAX_READS = 1000  # messages read from one socket before the other sockets are polled
MAX_READ_S = 0.05  # the same in time: a large message takes some milliseconds, and frontends wait for a Status
MAX_INBOX = 1 << 16  # messages; while the inbox is full, no message is read, and senders have to wait
MAX_FRONTENDS = 1024
POLL_MS = 100
MAX_LEASE_IDS = 1 << 16  # a Lease with more ids renews the lease, but aborts no requests


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """A message in the inbox: a frontend disconnected or fell silent, so its requests must be aborted."""


@dataclass(slots=True)
class FrontendPeer:
    """A frontend whose lease is valid."""

    pid: int
    last_seen: float
    seq: int = 0  # sequence number of the next Step
    streams: int = 0  # number of live requests in its latest Lease


@dataclass(slots=True)
class WireCounters:
    """Counts events since the process started."""

    garbage: int = 0  # frames that are not valid requests
    unsent: int = 0  # frames dropped because a frontend did not keep up
    reaped: int = 0  # frontends that disconnected or fell silent


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts about this worker that a Welcome states. `limits` is None until the model is loaded."""

    epoch: int
    model: str
    tokenizer_hash: str = ""
    limits: m.Limits | None = None
    fingerprint: str = ""
    kv_space: str = ""  # see Welcome
    kv_store_tokens: int = 0


@dataclass(slots=True)
class WireServer:
    """Owns the sockets and the I/O thread.

    Start it before loading the model, so that `/ready` on every frontend shows the progress.
    """

    wire: WireConfig
    identity: Identity
    lease_timeout: float  # seconds
    snapshot: Callable[[], m.Status]  # makes a Status; called in the I/O thread
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    inbox: deque[tuple[bytes, m.Request | FrontendGone]] = field(default_factory=deque)
    awake: threading.Event = field(default_factory=threading.Event)
    step_progress: Callable[[], int] = lambda: 0  # grows while a step makes progress; called in the I/O thread
    prefixes: Callable[[], m.CachedPrefixes] = m.CachedPrefixes  # makes a Status's report; called in the I/O thread
    progressed_at: float = field(default_factory=time.monotonic)  # when the compute loop last made progress
    counters: WireCounters = field(default_factory=WireCounters)
    _peers: dict[bytes, FrontendPeer] = field(default_factory=dict)
    _subscribers: Counter[bytes] = field(default_factory=Counter)  # number of connections per topic
    _other_versions: deque[bytes] = field(default_factory=lambda: deque(maxlen=64))  # frontends already logged
    _outbox: deque[tuple[bytes, m.Step]] = field(default_factory=deque)
    _wakeup: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _last_progress: int = 0
    _status_due: float = 0.0
    _stop: bool = False
    _thread: threading.Thread | None = None
    _context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    _authenticator: Authenticator | None = None
    _router: zmq.Socket[bytes] = field(init=False)
    _xpub: zmq.Socket[bytes] = field(init=False)

    def totals(self) -> dict[str, int]:
        """Returns the totals that /metrics shows, by their names in /metrics."""
        return {
            "wire_garbage": self.counters.garbage,
            "wire_unsent": self.counters.unsent,
            "wire_refused": self._authenticator.refused if self._authenticator is not None else 0,
            "leases_reaped": self.counters.reaped,
        }

    def status(self) -> m.Status:
        """Returns the current Status, with the frontends and the age of the last progress. Any thread may call this."""
        peers = tuple(
            m.ConnectedFrontend(id.hex(), peer.pid, peer.streams, peer.seq) for id, peer in list(self._peers.items())
        )
        age = time.monotonic() - self.progressed_at
        return msgspec.structs.replace(self.snapshot(), last_step_age_s=age, frontends=peers)

    # called by the compute loop

    def start(self) -> None:
        """Binds the sockets and starts the I/O thread. Raises ConfigError when an address is taken or not protected."""
        self._authenticator = Authenticator.open(self._context, self.wire)
        self._router = bind(self._context, zmq.ROUTER, self.wire.requests, self.wire)
        self._xpub = bind(self._context, zmq.XPUB, self.wire.events, self.wire)
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """Notes that the compute loop has made progress."""
        self.progressed_at = time.monotonic()
        self.heartbeat.progress()

    def publish(self, topic: bytes, step: m.Step) -> None:
        """Queues a frame. The I/O thread numbers it when it sends it."""
        self._outbox.append((topic, step))

    def flush(self) -> None:
        """Wakes the I/O thread, so that it sends the queued frames."""
        os.eventfd_write(self._wakeup, 1)

    def refresh(self) -> None:
        """Broadcasts Status without waiting for the interval, for frontends that wait for a change."""
        self._status_due = 0.0
        self.flush()

    def wait(self, timeout: float) -> None:
        """Waits until the inbox holds a message or `awake` is set, but at most `timeout` seconds."""
        if not self.inbox:
            self.awake.wait(timeout)
        self.awake.clear()

    def close(self) -> None:
        """Sends the queued frames and a last Status, then ends the thread and closes the sockets."""
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
        for source in (self._router, self._xpub, self._wakeup):
            poller.register(source, zmq.POLLIN)
        if self._authenticator is not None:
            poller.register(self._authenticator.socket, zmq.POLLIN)
        while not self._stop or self._outbox:
            self._report_progress()
            ready = dict(poller.poll(POLL_MS))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            if self._authenticator is not None and self._authenticator.socket in ready:
                self._authenticator.answer()
            self._send_outbox()
            if self._router in ready:
                self._receive_requests()
            if self._xpub in ready:
                self._receive_subscriptions()
            now = time.monotonic()
            if now >= self._status_due:
                self._status_due = now + STATUS_INTERVAL_S
                self._reap_silent(now)
                self._broadcast()
                if self._authenticator is not None:
                    self._authenticator.refresh()
        self._broadcast()

    def _report_progress(self) -> None:
        self.heartbeat.alive()
        progress = self.step_progress()
        if progress != self._last_progress:
            self._last_progress = progress
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
            self.counters.unsent += 1

    def _receive_requests(self) -> None:
        if len(self.inbox) >= MAX_INBOX:
            time.sleep(0.001)
            return
        until = time.monotonic() + MAX_READ_S
        for _ in range(MAX_READS):
            try:
                sender, *body = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(sender.bytes, body)
            if time.monotonic() > until:
                return

    def _receive(self, sender: bytes, body: list[zmq.Frame]) -> None:
        if self._authenticator is not None and not self._authenticator.is_allowed(body):
            self._remove(sender)
            return
        try:
            request = decode_request(body[-1].buffer)
        except (msgspec.DecodeError, IndexError) as error:
            self._drop(f"cannot read a frame from {sender.hex()}: {error}")
            return
        self._on_request(sender, request)

    def _drop(self, reason: str) -> None:
        if self.counters.garbage == 0:
            log.warning("dropped: %s (more are only counted)", reason)
        self.counters.garbage += 1

    def _on_request(self, sender: bytes, request: m.Request) -> None:
        peer = self._peers.get(sender)
        if peer is not None:
            peer.last_seen = time.monotonic()
        match request:
            case m.Hello():
                self._welcome(sender, request)
            case m.Lease() if peer is not None:
                peer.streams = request.live
                if request.last_id and len(request.ids) % 4 == 0 and len(request.ids) <= 4 * MAX_LEASE_IDS:
                    self._deliver(sender, request)
            case m.Submit() | m.Abort() | m.Resync() | m.ResetPrefixCache() if peer is not None:
                self._deliver(sender, request)
            case _:
                self._drop(f"{type(request).__name__} from {sender.hex()}, which has sent no Hello")

    def _deliver(self, sender: bytes, request: m.Request) -> None:
        self.inbox.append((sender, request))
        self.awake.set()

    def _welcome(self, sender: bytes, hello: m.Hello) -> None:
        limits = self.identity.limits
        if limits is None:
            return
        if len(sender) != m.TOPIC_BYTES or sender == m.BROADCAST:
            self._drop(f"Hello from {sender.hex()}, which is no valid frontend id")
            return
        if sender not in self._peers and len(self._peers) >= MAX_FRONTENDS:
            self._drop(f"Hello from {sender.hex()}, beyond the {MAX_FRONTENDS} frontends that are connected")
            return
        seq = 0
        if hello.version == m.PROTOCOL_VERSION:
            seq = self._peers.setdefault(sender, FrontendPeer(hello.pid, time.monotonic())).seq
        elif sender not in self._other_versions:
            self._other_versions.append(sender)
            log.warning(
                "frontend %s (process %d on %s) speaks protocol %d, not %d",
                sender.hex(), hello.pid, hello.host, hello.version, m.PROTOCOL_VERSION,
            )  # fmt: skip
        mine = self.identity
        welcome = m.Welcome(
            hello.nonce, mine.epoch, os.getpid(), mine.model, mine.tokenizer_hash, limits, seq=seq,
            fingerprint=mine.fingerprint, kv_space=mine.kv_space, kv_store_tokens=mine.kv_store_tokens,
        )  # fmt: skip
        self._send(sender, welcome)

    def _receive_subscriptions(self) -> None:
        for _ in range(MAX_READS):
            try:
                message = self._xpub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if message[:1] in (b"\0", b"\1") and len(message) == 1 + m.TOPIC_BYTES:
                self._count_subscribers(message[1:], 1 if message[0] else -1)

    def _count_subscribers(self, id: bytes, change: int) -> None:
        """Counts the connections of a frontend, and removes the frontend when its last connection is gone.

        A frontend that has reconnected is therefore not removed when its old connection breaks.
        """
        self._subscribers[id] += change
        if self._subscribers[id] <= 0:
            del self._subscribers[id]
            self._remove(id)

    def _reap_silent(self, now: float) -> None:
        silent = [id for id, peer in self._peers.items() if now - peer.last_seen > self.lease_timeout]
        for id in silent:
            self._remove(id)

    def _remove(self, id: bytes) -> None:
        if self._peers.pop(id, None) is not None:
            self.counters.reaped += 1
            self.inbox.append((id, FrontendGone()))
            self.awake.set()

    def _broadcast(self) -> None:
        self._send(m.BROADCAST, msgspec.structs.replace(self.status(), prefixes=self.prefixes()))
