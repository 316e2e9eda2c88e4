"""Publishes the events of the journal on a PUB socket, and sends batches again on a ROUTER socket on request.

A thread owns both sockets, so a step never waits for them. A message is topic, sequence number (8 bytes, big-endian)
and batch. A consumer that sees a gap sends the first number that it lacks to the ROUTER. It gets this batch and all
later ones that are still kept, each after an empty frame, and then a message with the number -1.
"""

import logging
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import zmq

from shared.config.declaration import ConfigError
from shared.config.settings import Settings
from worker.engine.kv_events import EventBatch, PageJournal
from worker.scheduler.paging import Paging

log = logging.getLogger("sluice.kv_events")
POLL_MS = 10
LINGER_MS = 200
MAX_UNSENT = 10_000  # queued batches for one consumer; if it is too slow, it misses the next batches
MAX_KEPT, MAX_KEPT_BYTES = 10_000, 64 << 20  # how many batches are kept to be sent again, and how many bytes
MAX_ASKED_BYTES = 1024  # the largest frame that a consumer may send; a larger one ends its connection
MAX_REPLAYS = 8  # requests that are answered before the next batch is published
END = (-1).to_bytes(8, "big", signed=True)


@dataclass
class KvEventPublisher:
    """Publishes K/V events from a thread. Call open(), then start(), and at the end close()."""

    journal: PageJournal
    topic: bytes
    pub: "zmq.Socket[bytes]"
    replay: "zmq.Socket[bytes] | None"
    sequence: int = 0  # number of the next batch
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    _kept_bytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _encode: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)

    @classmethod
    def open(cls, journal: PageJournal, topic: str, endpoint: str, replay_endpoint: str) -> "KvEventPublisher":
        """Opens the sockets. The PUB socket binds if the endpoint is for all addresses (`*`, `0.0.0.0`, `[::]`), and
        connects otherwise. replay_endpoint: always bound; "": no ROUTER socket. Raises zmq.ZMQError."""
        context = zmq.Context[zmq.Socket[bytes]].instance()
        pub: zmq.Socket[bytes] = context.socket(zmq.PUB)
        pub.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        pub.setsockopt(zmq.LINGER, LINGER_MS)
        replay: zmq.Socket[bytes] | None = None
        try:
            pub.setsockopt(zmq.IPV6, 1)
            pub.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED_BYTES)
            if binds(endpoint):
                pub.bind(endpoint)
            else:
                pub.connect(endpoint)
            if replay_endpoint:
                replay = context.socket(zmq.ROUTER)
                replay.setsockopt(zmq.SNDHWM, MAX_KEPT + 1)
                replay.setsockopt(zmq.LINGER, 0)
                replay.setsockopt(zmq.IPV6, 1)
                replay.setsockopt(zmq.MAXMSGSIZE, MAX_ASKED_BYTES)
                replay.bind(replay_endpoint)
        except zmq.ZMQError:
            pub.close(0)
            if replay is not None:
                replay.close(0)
            raise
        return cls(journal, topic.encode(), pub, replay)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publishes the remaining events, and closes the sockets."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.pub.close()
        if self.replay is not None:
            self.replay.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.publish()
            if self.replay is None:
                self._stop.wait(POLL_MS / 1e3)
            elif self.replay.poll(POLL_MS):
                self._answer(self.replay)
        self.publish()

    def publish(self) -> None:
        """Sends the events since the last call as one batch. Sends nothing if there are no events."""
        events = self.journal.take()
        if not events:
            return
        batch = self._encode.encode(EventBatch(time.time(), events))
        self.pub.send_multipart((self.topic, _number(self.sequence), batch), zmq.NOBLOCK)
        self._keep(batch)
        self.sequence += 1

    def _keep(self, batch: bytes) -> None:
        self.kept.append((self.sequence, batch))
        self._kept_bytes += len(batch)
        while len(self.kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self.kept.popleft()[1])

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Answers requests for batches. Ignores malformed requests."""
        for _ in range(MAX_REPLAYS):
            try:
                frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                log.warning("a request to --kv-events-replay-endpoint is no sequence number of 8 bytes")
                continue
            first = int.from_bytes(frames[2], "big")
            for number, batch in [*((n, b) for n, b in self.kept if n >= first), (-1, b"")]:
                replay.send_multipart((frames[0], b"", END if number < 0 else _number(number), batch), zmq.NOBLOCK)


def binds(endpoint: str) -> bool:
    """Whether the endpoint is for all addresses of this host."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0] in ("*", "0.0.0.0", "[::]")


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


# Starts the publisher of a worker's K/V events, according to the settings.


def start(settings: Settings, paging: Paging) -> KvEventPublisher:
    """Returns a running publisher. Raises ConfigError if an endpoint cannot be used."""
    worker, model = settings.worker, settings.model
    name = (model.served_model_name or model.model).split(",")[0]
    topic = f"kv@{worker.kv_events_pod or socket.gethostname()}@{name}"
    journal = PageJournal.of(paging)
    try:
        publisher = KvEventPublisher.open(journal, topic, worker.kv_events_endpoint, worker.kv_events_replay_endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"--kv-events-endpoint {worker.kv_events_endpoint} or --kv-events-replay-endpoint "
            f"{worker.kv_events_replay_endpoint!r} cannot be used: {error.strerror}"
        ) from error
    publisher.start()
    return publisher
