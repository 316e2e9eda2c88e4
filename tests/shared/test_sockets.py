"""Tests of shared/wire.py."""

import os
import socket
from pathlib import Path

import pytest
import zmq

from shared.config.declaration import ConfigError
from shared.config.settings import WireConfig
from shared.wire import bind, connect


def test_connect_to_a_silent_host_is_retried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system alone would retry only after two minutes. A listener with a full queue drops new connections."""
    monkeypatch.setattr("shared.wire.CONNECT_MS", 100)
    with socket.socket() as deaf, socket.socket() as first, zmq.Context() as context:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        first.connect(deaf.getsockname())
        address = f"tcp://127.0.0.1:{deaf.getsockname()[1]}"
        with connect(context, zmq.DEALER, address, WireConfig(insecure=True)) as sock:
            monitor = sock.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
            assert monitor.poll(10_000), "asked once"
            sock.disable_monitor()
            monitor.close()


def test_bind_refuses_an_address_open_to_others(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ConfigError, match="--curve-dir"):
        bind(context, zmq.ROUTER, "tcp://127.0.0.1:*", WireConfig())
    os.chmod(tmp_path, 0o755)
    with pytest.raises(ConfigError, match="0700"):
        bind(context, zmq.ROUTER, f"ipc://{tmp_path}/s", WireConfig())
    context.term()
