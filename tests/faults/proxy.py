"""Simulates a faulty wire: a proxy between frontends and a worker drops, delays and damages frames.

    frontends ──DEALER──► ROUTER ~ DEALER (one a frontend) ──► ROUTER worker
              ◄──SUB───── XPUB   ~ XSUB                    ◄── XPUB

Each direction has its `FrameFaults`; subscriptions pass unchanged. A seeded generator makes the decisions.
"""

import heapq
import itertools
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq

Frames = list[bytes]


@dataclass(frozen=True, slots=True)
class FrameFaults:
    """The share of frames (0 to 1) that suffers each fault, and the longest delay in seconds."""

    drop: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    late: float = 0.3
    reorder: float = 0.0  # share of frames that are held back until the next frame has passed
    truncate: float = 0.0

    def deliveries(self, rng: random.Random, frames: Frames) -> list[tuple[float, Frames]]:
        """Returns the copies of a frame to deliver, each with its delay in seconds; no copy of a dropped frame."""
        if rng.random() < self.drop:
            return []
        if rng.random() < self.truncate:
            frames = [*frames[:-1], frames[-1][: rng.randrange(len(frames[-1]) + 1)]]
        copies = 2 if rng.random() < self.double else 1
        wait = rng.uniform(0.0, self.late) if rng.random() < self.delay else 0.0
        return [(wait + i * rng.uniform(0.0, self.late), frames) for i in range(copies)]


NO_FAULTS = FrameFaults()


@dataclass
class Proxy:
    """Used as `with Proxy(worker's folder, frontends' folder) as proxy:`.

    Tests may set `requests` and `events` at any time.
    """

    worker: Path
    frontends: Path
    requests: FrameFaults = NO_FAULTS
    events: FrameFaults = NO_FAULTS
    seed: int = 0
    altered: int = 0  # frames that were changed, delayed or dropped
    _stop: bool = False
    _ends: dict[bytes, "zmq.Socket[bytes]"] = field(default_factory=dict)
    # by direction: the frame held back until the next frame has passed
    _held: dict[int, Frames] = field(default_factory=dict)
    _late: list[tuple[float, int, int, Frames]] = field(default_factory=list)

    def __enter__(self) -> "Proxy":
        self.frontends.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rng = random.Random(self.seed)
        self._count = itertools.count()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.bind(f"ipc://{self.frontends}/requests.sock")
        self._xpub = self._socket(zmq.XPUB)
        self._xpub.bind(f"ipc://{self.frontends}/events.sock")
        self._xsub = self._socket(zmq.XSUB)
        self._xsub.connect(f"ipc://{self.worker}/events.sock")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self._context.destroy(linger=0)

    def stop_faults(self) -> None:
        self.requests = self.events = NO_FAULTS

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.RECONNECT_IVL, 50)
        return sock

    def _run(self) -> None:
        poller = zmq.Poller()
        for sock in (self._router, self._xpub, self._xsub):
            poller.register(sock, zmq.POLLIN)
        while not self._stop:
            ready = dict(poller.poll(20 if not self._late else 2))
            if self._xpub in ready:
                self._xsub.send(self._xpub.recv())
            if self._router in ready:
                self._pass(0, self._router.recv_multipart(), self.requests)
            if self._xsub in ready:
                self._pass(1, self._xsub.recv_multipart(), self.events)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, way, frames = heapq.heappop(self._late)
                self._send(way, frames)

    def _pass(self, way: int, frames: Frames, faults: FrameFaults) -> None:
        """Passes on a frame. way: 0 towards the worker, 1 from the worker"""
        if way not in self._held and self._rng.random() < faults.reorder:
            self._held[way] = frames
            self.altered += 1
            return
        deliveries = faults.deliveries(self._rng, frames)
        self.altered += deliveries != [(0.0, frames)]
        for wait, copy in deliveries:
            if wait:
                heapq.heappush(self._late, (time.monotonic() + wait, next(self._count), way, copy))
            else:
                self._send(way, copy)
        if way in self._held:
            self._send(way, self._held.pop(way))

    def _send(self, way: int, frames: Frames) -> None:
        if way:
            self._xpub.send_multipart(frames)
            return
        sender, *body = frames
        if sender not in self._ends:
            end = self._ends[sender] = self._socket(zmq.DEALER)
            end.setsockopt(zmq.IDENTITY, sender)
            end.connect(f"ipc://{self.worker}/requests.sock")
        self._ends[sender].send_multipart(body)
