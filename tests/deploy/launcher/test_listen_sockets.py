"""Listening sockets."""

import asyncio
import contextlib
import socket

import pytest

from deploy.launcher.run_dir import OF_WORKERS, ListenError, is_taken, listen, reachable, url
from tests.deploy.launcher.harness import running, script
from tests.patience import PATIENCE_S


def test_sockets_share_one_port_exclusively() -> None:
    sockets = listen("127.0.0.1", 0, count=3)
    port = reachable(sockets[0])[1]
    assert {one.getsockname()[1] for one in sockets} == {port}
    assert is_taken("127.0.0.1", port)
    with pytest.raises(ListenError, match=f"port {port} is already in use"):
        listen("127.0.0.1", port)
    for one in sockets:
        one.close()
    assert not is_taken("127.0.0.1", port)


def test_port_in_time_wait_can_be_opened_again() -> None:
    [listener] = listen("127.0.0.1", 0)
    client = socket.create_connection(reachable(listener))
    listener.setblocking(True)
    accepted, _ = listener.accept()
    port = reachable(listener)[1]
    for one in (accepted, listener, client):  # leaves the port in TIME_WAIT
        one.close()
    [again] = listen("127.0.0.1", port)
    again.close()


def test_foreign_address_or_bad_host_is_one_line() -> None:
    with pytest.raises(ListenError, match="cannot listen on"):
        listen("203.0.113.1", 80)
    with pytest.raises(ListenError, match="cannot listen on --host"):
        listen("no such host", 80)
    with pytest.raises(ListenError, match=r"cannot listen on --host a\.\.b: that is not a host name"):
        listen("a..b", 80)
    with pytest.raises(ListenError, match="cannot listen on --worker-host"):
        listen("no such host", 80, flags=OF_WORKERS)


def test_port_in_use_names_the_flag_that_chooses_another() -> None:
    [listener] = listen("127.0.0.1", 0)
    with contextlib.closing(listener):
        port = reachable(listener)[1]
        with pytest.raises(ListenError, match="choose another with --port"):
            listen("127.0.0.1", port)
        with pytest.raises(ListenError, match="choose another with --worker-metrics-port"):
            listen("127.0.0.1", port, flags=OF_WORKERS)


def test_url_shows_wildcard_address_as_loopback() -> None:
    [listener] = listen("0.0.0.0", 0)
    with listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_connections_to_a_dead_frontend_wait_for_its_restart() -> None:
    [listener] = listen("127.0.0.1", 0)
    code = (
        f"import socket\ns = socket.socket(fileno={listener.fileno()}); s.setblocking(True)\n"
        "c, _ = s.accept(); c.recv(1); c.sendall(str(N).encode()); c.close()"
    )
    answers = []
    with listener:
        async with running(script("frontend 0", code, (listener.fileno(),))):
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*reachable(listener))
                writer.write(b"?")
                answers.append(await asyncio.wait_for(reader.read(), PATIENCE_S))
                writer.close()
    assert answers == [b"1", b"2", b"3"]
