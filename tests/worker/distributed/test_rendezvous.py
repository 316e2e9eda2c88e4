"""Ranks meet over TCP, each in a thread. A rank with another key or checkpoint is refused and told the reason."""

import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest

from shared.config.worker import WorkerConfig
from tests.patience import PATIENCE_S
from tests.worker.distributed.threads import together
from worker.distributed.handshake import (
    GREETING,
    NONCE,
    ORDERS,
    PROOF,
    PROTOCOL,
    Identity,
    Listener,
    WrongKey,
    connect,
    wait_for_end,
)
from worker.distributed.messages import receive, send
from worker.distributed.rendezvous import Gathered, Group, Hosts, Introduction, Joined, Refused, difference

FACTS, SECRET, WORKER = {"the version": "1", "--dtype": "float32"}, b"of the worker", WorkerConfig(max_step_tokens=77)


def free_ports(count: int) -> int:
    """Returns the first of `count` consecutive free ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        with closing_all() as probes:
            try:
                for port in range(first, first + count):
                    probes.append(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return first


@contextmanager
def closing_all() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def hosts(rank: int, count: int, port: int, secret: bytes = SECRET) -> Hosts:
    return Hosts(Group(rank, count, "127.0.0.1", port), secret)


def gather(count: int, port: int) -> Gathered:
    return hosts(0, count, port).gather(FACTS, WORKER, lambda: None)


def refused(port: int, joins: Hosts, facts: dict[str, str]) -> str:
    """Returns the reason why a rank is refused by rank 0, which continues to wait."""
    done = threading.Event()

    def leave() -> None:
        if done.is_set():
            raise TimeoutError

    def join() -> None:
        try:
            joins.join(facts)
        finally:
            done.set()

    waited, error = together([partial(hosts(0, 2, port).gather, FACTS, WORKER, leave), join])
    assert isinstance(waited, TimeoutError) and isinstance(error, Refused)
    return str(error)


def test_three_ranks_are_connected_each_with_each() -> None:
    port = free_ports(3)
    joins = [partial(hosts(rank, 3, port).join, FACTS) for rank in (1, 2)]
    leader, *others = together([partial(gather, 3, port), *joins])
    assert isinstance(leader, Gathered) and [one.rank for one in leader.members] == [1, 2]
    assert all(isinstance(one, Joined) and one.worker == WORKER for one in others)
    rows = [leader.rows, *(one.rows for one in others)]
    for one in range(3):
        for other in range(one):
            rows[one][other].sendall(bytes([one, other]))
            assert rows[other][one].recv(2) == bytes([one, other])
    assert not wait_for_end(leader.members[0].orders, 0)
    others[0].orders.close()
    assert wait_for_end(leader.members[0].orders, PATIENCE_S) == "the connection was closed"
    for link in (*(one.orders for one in (*leader.members, others[1])), *(x for each in rows for x in each.values())):
        link.close()


def test_another_key_is_told_to_who_connects_and_another_fact_names_both_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, other = free_ports(2), FACTS | {"--dtype": "bfloat16"}
    with caplog.at_level(logging.WARNING):
        key = refused(port, hosts(1, 2, port, b"stolen"), FACTS)
        fact = refused(port, hosts(1, 2, port), other)
    assert key == f"the rank at 127.0.0.1:{port} does not have the worker's key of --curve-dir"
    assert fact == "rank 1 has --dtype bfloat16, and rank 0 has float32"
    assert "refused a rank at 127.0.0.1" in caplog.text


def test_who_listens_lets_nobody_in_without_a_proof_of_its_own() -> None:
    """A stranger, and a client that returns the proof it received, are refused. A silent client delays no others."""
    port = free_ports(1)
    with Listener(port, SECRET) as listener, closing_all() as opened:
        for _ in range(3):
            opened.append(socket.create_connection(("127.0.0.1", port)))  # a client that sends nothing
        opened.append(stranger := socket.create_connection(("127.0.0.1", port)))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(GREETING.size, b" "))
        assert stranger.recv(1) == b""
        opened.append(mirror := socket.create_connection(("127.0.0.1", port)))
        mirror.sendall(GREETING.pack(PROTOCOL, bytes(NONCE), ORDERS, 1, bytes(16)))
        answer = mirror.recv(NONCE + PROOF, socket.MSG_WAITALL)
        mirror.sendall(answer[NONCE:])
        assert mirror.recv(1) == b""
        opened.append(connect("127.0.0.1", port, SECRET, Identity(ORDERS, 1)))
        peer = listener.next(PATIENCE_S)
        assert peer is not None and (peer.identity, peer.address) == (Identity(ORDERS, 1), "127.0.0.1")
        opened.append(peer.link)
        assert listener.next(0.1) is None
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port))


def test_who_connects_believes_nobody_without_the_key() -> None:
    def impostor(listener: socket.socket) -> None:
        link, _ = listener.accept()
        with link:
            greeting = link.recv(GREETING.size, socket.MSG_WAITALL)
            link.sendall(bytes(NONCE) + hmac.digest(b"guessed", b"listens" + greeting + bytes(NONCE), hashlib.sha256))
            assert link.recv(1) == b"", "no proof for an impostor"

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        found = together(
            [
                partial(impostor, listener),
                partial(connect, "127.0.0.1", listener.getsockname()[1], SECRET, Identity(ORDERS, 1)),
            ]
        )
    assert found[0] is None and isinstance(found[1], WrongKey)


def test_rank_that_goes_before_all_have_come_is_waited_for_again() -> None:
    port = free_ports(3)

    def come_and_go() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                link = connect("127.0.0.1", port, SECRET, Identity(ORDERS, 1))
            except OSError:
                time.sleep(0.05)
                continue
            send(link, Introduction(1, FACTS))
            link.close()
            return

    def second() -> Any:
        come_and_go()
        return together([partial(hosts(rank, 3, port).join, FACTS) for rank in (2, 1)])

    leader, joined = together([partial(gather, 3, port), second])
    assert isinstance(leader, Gathered) and all(isinstance(one, Joined) for one in joined)
    for link in (*(one.orders for one in leader.members), *leader.rows.values()):
        link.close()
    for one in joined:
        for link in (one.orders, *one.rows.values()):
            link.close()


def test_frame_that_is_too_long_is_refused_before_it_is_received() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((1 << 40).to_bytes(8, "little"))
        with pytest.raises(OSError, match="a frame of 1099511627776 bytes"):
            receive(theirs)


def test_difference_names_what_only_one_has() -> None:
    assert difference({"a": "1"}, {"a": "1", "b": "2"}) == "b 2, and rank 0 has none"
    assert difference(FACTS, dict(FACTS)) == ""
