"""The publisher of K/V events: its messages, the repetition of lost messages, and that no caller waits for it."""

import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values
from tests.e2e.server import free_port
from tests.patience import PATIENCE_S
from worker.engine import kv_events as publishers
from worker.engine.kv_events import END, KvEventPublisher, PageJournal, binds, start
from worker.kv_cache.pages import PagePool
from worker.scheduler.paging import Paging


class Rig:
    """A publisher on free ports, and sockets of consumers."""

    def __init__(self) -> None:
        self.ports = free_port(), free_port()
        self.paging = Paging([PagePool(9, 4)], prefix_cache=True, watermark=0.0, chunk=64)
        self.journal = PageJournal.of(self.paging)
        pub, replay = (f"tcp://*:{port}" for port in self.ports)
        self.publisher = KvEventPublisher.open(self.journal, "kv@pod@m", pub, replay)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def subscriber(self) -> "zmq.Socket[bytes]":
        found = self._socket(zmq.SUB, self.ports[0])
        found.subscribe(b"kv@")
        return found

    def asker(self) -> "zmq.Socket[bytes]":
        return self._socket(zmq.DEALER, self.ports[1])

    def _socket(self, kind: int, port: int) -> "zmq.Socket[bytes]":
        found: zmq.Socket[bytes] = self.context.socket(kind)
        self.sockets.append(found)
        found.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        found.connect(f"tcp://127.0.0.1:{port}")
        return found


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.publisher.close()
    for each in made.sockets:
        each.close(0)
    made.context.term()


def replayed(asker: "zmq.Socket[bytes]", first: int) -> list[tuple[int, bytes]]:
    asker.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while (frames := asker.recv_multipart())[1] != END:
        found.append((int.from_bytes(frames[1], "big"), frames[2]))
    assert frames == [b"", END, b""]
    return found


def test_messages_are_numbered_and_what_was_missed_is_sent_again(rig: Rig) -> None:
    rig.publisher.start()
    subscriber, asker = rig.subscriber(), rig.asker()
    seen: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(seen) < 2:  # a subscription takes some time to arrive
        assert time.monotonic() < deadline
        rig.journal.cleared()
        if subscriber.poll(50):
            topic, number, batch = subscriber.recv_multipart()
            assert topic == b"kv@pod@m"
            seen.append((int.from_bytes(number, "big"), batch))
    first, second = seen
    assert second[0] == first[0] + 1
    assert msgspec.msgpack.decode(first[1])[1] == [{"type": "AllBlocksCleared"}]
    every = replayed(asker, 0)
    assert [number for number, _ in every] == list(range(len(every))) and set(seen) <= set(every)
    assert replayed(asker, second[0]) == [one for one in every if one[0] >= second[0]]
    assert replayed(asker, 1 << 40) == []


def test_requests_that_are_none_are_ignored(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.publisher.start()
    asker = rig.asker()
    for frames in ([b""], [b"", b"123"], [b"x", bytes(8)], [b"", bytes(8), b""]):
        asker.send_multipart(frames)
    assert replayed(asker, 0)[0][0] == 0
    assert caplog.text.count("no sequence number") == 4


def test_requests_of_any_size_take_no_memory(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.publisher.start()
    asker = rig.asker()
    asker.send_multipart([b"", bytes(publishers.MAX_ASKED_BYTES + 1)])
    assert replayed(rig.asker(), 0)[0][0] == 0
    assert "no sequence number" not in caplog.text, "the worker has read it"


def test_what_is_kept_has_bounds(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishers, "MAX_KEPT", 3)
    for _ in range(5):
        rig.journal.cleared()
        rig.publisher.publish()
    assert [number for number, _ in rig.publisher.kept] == [2, 3, 4]
    monkeypatch.setattr(publishers, "MAX_KEPT_BYTES", 2 * len(rig.publisher.kept[0][1]))
    rig.journal.cleared()
    rig.publisher.publish()
    assert [number for number, _ in rig.publisher.kept] == [4, 5]
    rig.publisher.publish()
    assert rig.publisher.sequence == 6, "nothing happened, so nothing is sent"


def test_consumer_that_does_not_read_holds_up_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    subscriber = rig.subscriber()
    subscriber.setsockopt(zmq.RCVHWM, 1)
    for _ in range(publishers.MAX_UNSENT + 1000):
        rig.journal.cleared()
        rig.publisher.publish()
    assert rig.publisher.sequence == publishers.MAX_UNSENT + 1000


def test_endpoint_for_all_addresses_is_bound_and_others_are_connected_to() -> None:
    assert [binds(f"tcp://{host}:5557") for host in ("*", "0.0.0.0", "[::]", "10.0.0.1", "router")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_port_that_is_taken_is_named() -> None:
    paging = Paging([PagePool(9, 4)], prefix_cache=True, watermark=0.0, chunk=64)
    port = free_port()
    settings = with_values(Settings(), {"kv_events_endpoint": f"tcp://*:{port}"})
    running = start(settings, paging)
    try:
        with pytest.raises(ConfigError, match=f"--kv-events-endpoint tcp://.*{port}"):
            start(settings, paging)
    finally:
        running.close()
