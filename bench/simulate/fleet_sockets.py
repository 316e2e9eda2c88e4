"""Measures the CPU time of a frontend that is connected to many workers by real sockets and has no requests.

    python -m bench.simulate.fleet_sockets [--workers 100 600 1000] [--frontends 50] [--seconds 5]

The workers are sockets of one other process, without schedulers. They answer handshakes, and each sends a status five
times a second, as real workers do; a status lists --frontends frontends. The frontend is the real worker pool. The
table has the time until all workers are ready, the frontend's open files, and its CPU time: of the event loop per
status (with the periodic work of connections), and of the whole process in percent of a core.
"""

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import zmq

from bench.client.summary import aligned
from frontend.server.http_protocol import available_connections
from frontend.workers.membership import Discovery
from frontend.workers.pool import WorkerPool
from shared import messages as m
from shared.address import Address
from shared.config.flags import positive_float, positive_int
from shared.config.settings import WireConfig
from shared.wire import bind, decode_request, encode, large_context

STATUS_S = 0.2
FILES = 20_000  # limit of open files that each of the two processes requests
READY_S = 120.0
LIMITS = m.Limits(4096, 32_000, (2,), max_sequences=64)


def address(folder: Path, index: int) -> Address:
    requests, events = (f"ipc://{folder}/{index}.{kind}" for kind in ("requests", "events"))
    return Address(requests, requests, events)


@dataclass
class FakeWorker:
    """A worker that computes nothing: its two sockets. known: the frontend that has connected, if any"""

    router: "zmq.Socket[bytes]"
    events: "zmq.Socket[bytes]"
    known: tuple[m.ConnectedFrontend, ...] = ()

    def answer(self) -> None:
        while self.router.poll(0):
            sender, *_, body = self.router.recv_multipart()
            request = decode_request(body)
            if isinstance(request, m.Hello):
                self.known = (m.ConnectedFrontend(sender.hex(), request.pid, 0, 0),)
                welcome = m.Welcome(request.nonce, 1, 1, "fleet", "", LIMITS, fingerprint="fp")
                self.events.send_multipart((sender, encode(welcome)), zmq.NOBLOCK)

    def report(self, others: tuple[m.ConnectedFrontend, ...]) -> None:
        status = m.Status(
            1, 1, "fleet", "cpu", "bfloat16", m.WorkerState.READY, 1.0, 1000, 4096, 0.01, 4, 1, 100,
            m.Pages(1000, 1000, 500, 2500), 9_000, 5_000,
            frontends=(*others[len(self.known) :], *self.known), kernels="c",
            kv_cache=(m.KVUsage("full", 500, 2500, 1 << 30),),
        )  # fmt: skip
        self.events.send_multipart((m.BROADCAST, encode(status)), zmq.NOBLOCK)


def serve(folder: Path, workers: int, frontends: int, stopped: Event | threading.Event) -> None:
    """Runs `workers` fake workers, with sockets in `folder`, until `stopped` is set."""
    available_connections(FILES)
    wire = WireConfig(run_dir=str(folder))
    others = tuple(m.ConnectedFrontend(f"{n:032x}", 4000 + n, 10, 1000) for n in range(frontends))
    with large_context() as context:
        context.linger = 0
        each = [
            FakeWorker(bind(context, zmq.ROUTER, one.requests, wire), bind(context, zmq.XPUB, one.events, wire))
            for one in (address(folder, index) for index in range(workers))
        ]
        while not stopped.is_set():
            due = time.monotonic() + STATUS_S
            for worker in each:
                worker.answer()
                worker.report(others)
            stopped.wait(max(0.0, due - time.monotonic()))
        for worker in each:
            worker.router.close()
            worker.events.close()


@dataclass
class Cost:
    """The frontend's measured cost.

    loop_s: CPU seconds of the event loop. process_s: CPU seconds of the whole process. Both were used within `seconds`.
    """

    ready_s: float
    files: int
    statuses: int
    loop_s: float
    process_s: float
    seconds: float


async def measure(folder: Path, workers: int, seconds: float) -> Cost:
    """Connects a pool to all workers in `folder` and measures it; raises TimeoutError if not all become ready."""
    available_connections(FILES)
    addresses = [address(folder, index) for index in range(workers)]
    begun = time.monotonic()
    pool = WorkerPool(WireConfig(run_dir=str(folder)), Discovery(addresses))
    await pool.start()
    try:
        while len(pool.membership.ready()) < workers:
            if time.monotonic() - begun > READY_S:
                raise TimeoutError(f"only {len(pool.membership.ready())} of {workers} workers are ready")
            await asyncio.sleep(0.1)
        ready_s, counts = time.monotonic() - begun, _count_statuses(pool)
        loop, process, at = time.thread_time(), time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        return Cost(
            ready_s, len(os.listdir("/proc/self/fd")), sum(counts), time.thread_time() - loop,
            time.process_time() - process, time.monotonic() - at,
        )  # fmt: skip
    finally:
        await pool.close()


def _count_statuses(pool: WorkerPool) -> list[int]:
    """Returns a list to which a 1 is appended for each status that arrives from now on."""
    seen: list[int] = []
    for connection in pool.membership.connections:
        original = connection._on_status

        def counted(status: m.Status, original: Callable[[m.Status], None] = original) -> None:
            seen.append(1)
            original(status)

        connection._on_status = counted  # type: ignore[method-assign]
    return seen


def row(workers: int, frontends: int, seconds: float) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        folder, spawn = Path(name), multiprocessing.get_context("spawn")
        stopped = spawn.Event()
        process = spawn.Process(target=serve, args=(folder, workers, frontends, stopped))
        process.start()
        try:
            cost = asyncio.run(measure(folder, workers, seconds))
        finally:
            stopped.set()
            process.join()
    return [
        str(workers), str(frontends), f"{cost.ready_s:.1f}", str(cost.files), f"{cost.statuses / cost.seconds:.0f}",
        f"{cost.loop_s / max(1, cost.statuses) * 1e6:.0f}", f"{cost.process_s / cost.seconds:.0%}",
    ]  # fmt: skip


HEAD = ["workers", "frontends", "ready after s", "open files", "statuses/s", "µs a status", "of a core"]


def main(argv: list[str] | None = None, show: Callable[[Any], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=positive_int, nargs="+", default=[100, 600, 1000])
    parser.add_argument("--frontends", type=positive_int, default=50, help="that each status names")
    parser.add_argument("--seconds", type=positive_float, default=5.0)
    args = parser.parse_args(argv)
    show(aligned([HEAD, *(row(workers, args.frontends, args.seconds) for workers in args.workers)]))


if __name__ == "__main__":
    main()
