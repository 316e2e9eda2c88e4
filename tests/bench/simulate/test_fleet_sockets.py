"""A frontend can use the real sockets of more workers than libzmq allows by default."""

import threading
from pathlib import Path

import pytest

from bench.simulate.fleet_sockets import FILES, measure, serve
from frontend.server.http_protocol import available_connections

WORKERS = 520  # libzmq's default is enough for 511


@pytest.mark.skipif(available_connections(FILES) < FILES // 2, reason="too few open files (ulimit -n)")
async def test_a_frontend_greets_more_workers_than_libzmq_allows_by_default(tmp_path: Path) -> None:
    stopped = threading.Event()
    thread = threading.Thread(target=serve, args=(tmp_path, WORKERS, 3, stopped))
    thread.start()
    try:
        cost = await measure(tmp_path, WORKERS, 0.5)
    finally:
        stopped.set()
        thread.join()
    assert cost.files > 4 * WORKERS and cost.statuses > 0 < cost.loop_s
