"""A worker without a model, and a client that reads the frontends' streams, in one thread.

A step starts when all streams have received the previous step. So a frontend processes exactly the steps that the
benchmark sends, even on a busy machine, and its CPU time is the cost of these steps only. The worker's transport is the
real one (worker/engine/transport.py). The client counts events on plain sockets with epoll.
"""

import json
import re
import select
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.client.server import BenchError
from shared.config.settings import WireConfig
from shared.messages import Admitted, End, Limits, Outcome, Status, Step, Submit, WorkerState
from shared.wire import pack_u32
from worker.engine.transport import Identity, WireServer

EPOCH = 1
TIMEOUT_S = 60.0
POLL_S = 0.0005
READ_BYTES = 1 << 18
STATUS = re.compile(rb"HTTP/1\.1 (\d+)")


@dataclass(slots=True)
class Group:
    """Sequences that are stepped together. at: how many output tokens each of them has"""

    live: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))  # frontend -> ids of its sequences
    at: int = 0


class ScriptedWorker:
    """Admits every request. `step` sends each sequence its next ids."""

    def __init__(self, folder: Path, model: str, words: Sequence[int], vocab: int) -> None:
        """words: the ids that every sequence gets, repeated cyclically."""
        self.group = Group()  # gets the sequences that are admitted
        self._words = list(words)
        identity = Identity(EPOCH, model, "", Limits(1 << 20, vocab, ()))
        status = Status(EPOCH, 1, model, "cpu", "float32", WorkerState.READY, max_seq_len=1 << 20)
        self._server = WireServer(WireConfig(run_dir=str(folder)), identity, 30.0, lambda: status)
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def receive(self, timeout: float = 0.01, *, first: bool = False) -> int:
        """Admits new requests and returns their number. first: whether to send each of them its first token at once."""
        self._server.progress()
        self._server.wait(timeout)
        received: dict[bytes, list[int]] = defaultdict(list)
        while self._server.inbox:
            sender, message = self._server.inbox.popleft()
            if isinstance(message, Submit):
                received[sender].append(message.id)
        for sender, ids in received.items():
            self.group.live[sender] += ids
            self._server.publish(sender, Step(EPOCH, 0, admitted=tuple(Admitted(id, 1) for id in ids)))
            if first:
                self.group.at = 1
                self._server.publish(sender, _tokens(ids, 0, self._words[:1]))
        self._server.flush()
        return sum(map(len, received.values()))

    def step(self, count: int = 1, *, last: bool = False) -> None:
        """Sends `count` tokens to every sequence. last: whether all sequences end with these tokens."""
        at, self.group.at = self.group.at, self.group.at + count
        run = [self._words[(at + i) % len(self._words)] for i in range(count)]
        for sender, ids in self.group.live.items():
            ends = tuple(End(id, Outcome.LENGTH, self.group.at) for id in ids) if last else ()
            self._server.publish(sender, _tokens(ids, at, run, ends))
        self._server.progress()
        self._server.flush()
        if last:
            self.group = Group()


def _tokens(ids: Sequence[int], at: int, run: Sequence[int], ends: tuple[End, ...] = ()) -> Step:
    """Makes a Step with the same tokens for each sequence, from offset `at`."""
    n = len(ids)
    return Step(
        EPOCH, 0, pack_u32(ids), pack_u32([at]) * n, pack_u32([len(run)]) * n, pack_u32(run) * n, ends=ends
    )  # fmt: skip


class StreamReaders:
    """Many streams, read together."""

    def __init__(self, ports: Sequence[int], streams: int) -> None:
        """Connects the streams to the ports in turn, one connection for each stream. Raises OSError if a connection
        fails."""
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._tails: dict[int, bytes] = {}
        for i in range(streams):
            socket_ = socket.create_connection(("127.0.0.1", ports[i % len(ports)]), TIMEOUT_S)
            socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[socket_.fileno()] = socket_
            self._poll.register(socket_, select.EPOLLIN)

    def close(self) -> None:
        for socket_ in self._sockets.values():
            socket_.close()
        self._poll.close()

    def send(self, request: bytes) -> None:
        for socket_ in self._sockets.values():
            socket_.sendall(request)

    def send_each(self, request: Callable[[int], bytes]) -> None:
        """Sends to each stream a request of its own. request: gets the number of the stream"""
        for number, socket_ in enumerate(self._sockets.values()):
            socket_.sendall(request(number))

    def read(self, events: int, mark: bytes = b"\n\n", meanwhile: Callable[[], object] = lambda: None) -> list[float]:
        """Reads until every stream has received `events` more marks. Returns the seconds that each stream took, in
        ascending order.

        mark: bytes at the end of an event. meanwhile: called repeatedly.
        Raises BenchError if a stream ends, reports an error, or is silent for long.
        """
        left, done = dict.fromkeys(self._sockets, events), list[float]()
        begun = time.monotonic()
        while left:
            meanwhile()
            # sleeps instead of blocking on the sockets: waking the reader would cost the sender time for each stream
            time.sleep(POLL_S)
            for fd, _ in self._poll.poll(0):
                data = self._tails.pop(fd, b"") + self._sockets[fd].recv(READ_BYTES)
                self._check(data)
                missing = left[fd] - data.count(mark) if fd in left else 0
                if missing > 0:
                    left[fd] = missing
                    self._tails[fd] = data[-len(mark) + 1 :] if len(mark) > 1 else b""
                elif left.pop(fd, None):
                    done.append(time.monotonic() - begun)
            if time.monotonic() > begun + TIMEOUT_S:
                raise BenchError(f"{len(left)} streams of {len(self._sockets)} stalled")
        return done

    def _check(self, data: bytes) -> None:
        status = STATUS.match(data)
        if not data or (status and status[1] != b"200"):
            raise BenchError(f"a stream was not served: {data[:300].decode(errors='replace') or 'it was cut off'}")


def request(path: str, body: dict[str, Any] | None = None, headers: str = "") -> bytes:
    """Encodes an HTTP request: POST, or GET if there is no body. headers: further ones, each with its line break"""
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    return (head + headers).encode() + b"content-type: application/json\r\n\r\n" + data


@contextmanager
def connected_streams(ports: Sequence[int], streams: int) -> Iterator[StreamReaders]:
    socket_ = StreamReaders(ports, streams)
    try:
        yield socket_
    finally:
        socket_.close()


def admit(worker: ScriptedWorker, streams: int) -> None:
    """Waits until `streams` more requests have arrived and been admitted. Raises BenchError if it takes too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while streams > 0:
        streams -= worker.receive()
        if time.monotonic() > deadline:
            raise BenchError(f"{streams} requests never reached the worker")
