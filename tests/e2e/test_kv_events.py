"""A server that publishes K/V events: the events that a router sees for a prompt, and when a worker dies."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.checkpoints import Checkpoints
from tests.e2e.server import free_port, serving
from tests.patience import PATIENCE_S
from worker.engine.kv_events import END

PROMPT = list(range(10, 74))
CLEARED = {"type": "AllBlocksCleared"}


def history(port: int) -> list[dict[str, Any]]:
    """Returns all events of the worker that listens on the port; empty if it does not answer soon."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart([b"", bytes(8)])
        events: list[dict[str, Any]] = []
        while socket.poll(2000):
            _, number, batch = socket.recv_multipart()
            if number == END:
                return events
            events += msgspec.msgpack.decode(batch)[1]
    return []


def until(port: int, *types: str) -> list[dict[str, Any]]:
    """Waits until the events have these types, and returns the events."""
    deadline, events = time.monotonic() + PATIENCE_S, list[dict[str, Any]]()
    while [event["type"] for event in events] != [*types]:
        assert time.monotonic() < deadline, events
        events = history(port)
    return events


def test_router_sees_the_pages_of_a_prompt_and_that_a_new_worker_has_none(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    port = free_port()
    flags = ("--kv-events-endpoint", f"tcp://*:{free_port()}", "--kv-events-replay-endpoint", f"tcp://*:{port}")
    with serving(checkpoints("llama"), tmp_path / "log", *flags, "--page-size", "16") as server:
        assert until(port, "AllBlocksCleared") == [CLEARED]
        server.events(PROMPT, 3)
        _, stored = until(port, "AllBlocksCleared", "BlockStored")
        rendered = server.client.post("/v1/completions/render", json={"model": "m", "prompt": PROMPT}).json()
        assert stored["token_ids"] == rendered[0]["token_ids"] == PROMPT
        assert (len(stored["block_hashes"]), stored["block_size"], stored["parent_block_hash"]) == (4, 16, None)
        server.events(PROMPT, 3)
        os.kill(server.stats()["workers"][0]["pid"], signal.SIGKILL)
        assert until(port, "AllBlocksCleared") == [CLEARED]
