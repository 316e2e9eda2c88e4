"""The catalog of faults: in processes, on the wire between them, and from outside."""

import asyncio
import os
import random
import signal

import psutil

from tests.faults import bad_clients, environment, remote_host
from tests.faults.fault import Fault, Inject, Recovered, at_once
from tests.faults.proxy import FrameFaults
from tests.faults.server import ServerPlan, ServerUnderTest

_ALL = FrameFaults(drop=0.1, double=0.1, delay=0.2, reorder=0.1, truncate=0.1)


async def _kill_worker(server: ServerUnderTest, rng: random.Random) -> Recovered:
    pid = await server.worker()
    os.kill(pid, signal.SIGKILL)
    if server.restart:
        server.restart()
    return lambda stats: stats["worker"]["pid"] != pid and stats["worker"]["state"] == "ready"


async def _kill_one_of_two(server: ServerUnderTest, rng: random.Random) -> Recovered:
    busiest = max((await server.stats())["workers"], key=lambda worker: worker["streams"])
    os.kill(busiest["pid"], signal.SIGKILL)
    return lambda stats: all(one["ready"] and one["pid"] != busiest["pid"] for one in stats["workers"])


async def _kill_worker_thrice(server: ServerUnderTest, rng: random.Random) -> Recovered:
    for _ in range(2):
        await server.until(await _kill_worker(server, rng))
        await server.until_ready()
        await server.until(lambda stats: stats["throughput"]["generation"] > 0 and stats["running"] > 0)
    return await _kill_worker(server, rng)


def _stop_worker(seconds: float) -> Inject:
    async def inject(server: ServerUnderTest, rng: random.Random) -> Recovered:
        await _stop(await server.worker(), seconds)
        return at_once

    return inject


async def _hang_worker(server: ServerUnderTest, rng: random.Random) -> Recovered:
    pid = await server.worker()
    os.kill(pid, signal.SIGSTOP)
    return lambda stats: stats["worker"]["pid"] != pid and stats["worker"]["state"] == "ready"


async def _busiest(server: ServerUnderTest) -> int:
    """The pid of the frontend with the most connections."""
    return max(await server.frontends(), key=lambda pid: len(psutil.Process(pid).net_connections("tcp")))


async def _kill_frontend(server: ServerUnderTest, rng: random.Random) -> Recovered:
    victim = await _busiest(server)
    os.kill(victim, signal.SIGKILL)
    return lambda s: len(s["frontends"]) == 2 and victim not in {peer["pid"] for peer in s["frontends"]}


def _stop_frontend(seconds: float) -> Inject:
    async def inject(server: ServerUnderTest, rng: random.Random) -> Recovered:
        await _stop(await _busiest(server), seconds)
        return lambda stats: len(stats["frontends"]) == 2

    return inject


async def _stop(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def _wire(requests: FrameFaults, events: FrameFaults, altered: int = 0) -> Inject:
    """Returns a fault that alters frames for three seconds, and then until `altered` frames were changed."""

    async def inject(server: ServerUnderTest, rng: random.Random) -> Recovered:
        assert server.proxy is not None
        server.proxy.requests, server.proxy.events = requests, events
        await asyncio.sleep(3.0)
        while server.proxy.altered < altered:
            await asyncio.sleep(0.05)
        server.proxy.stop_faults()
        return at_once

    return inject


async def _bad_wire_and_kill(server: ServerUnderTest, rng: random.Random) -> Recovered:
    frame_faults = asyncio.create_task(_wire(_ALL, _ALL)(server, rng))
    await asyncio.sleep(1.5)
    recovered = await _kill_worker(server, rng)
    await frame_faults
    return recovered


async def _drain(server: ServerUnderTest, rng: random.Random) -> Recovered:
    server.processes[0].send_signal(signal.SIGTERM)
    return at_once


async def _drain_everyone(server: ServerUnderTest, rng: random.Random) -> Recovered:
    """Sends SIGTERM to all processes at once, as some service managers do; the launcher signals its children, too."""
    launcher, *children = server.process_tree()
    for child in children:
        child.terminate()
    await asyncio.sleep(0.2)
    launcher.terminate()
    return at_once


async def _no_fault(server: ServerUnderTest, rng: random.Random) -> Recovered:
    return at_once


async def _cut_wire(server: ServerUnderTest, rng: random.Random) -> Recovered:
    """Drops every frame for longer than a lease lasts."""
    assert server.proxy is not None
    all_dropped = FrameFaults(drop=1.0)
    server.proxy.requests = server.proxy.events = all_dropped
    await asyncio.sleep(4.0)
    server.proxy.stop_faults()
    return lambda stats: len(stats["frontends"]) == 2


_SPLIT = ServerPlan(split=True)
_LEASE = ("--lease-timeout", "2")


def _both_directions(about: str, **shares: float) -> tuple[Fault, Fault]:
    """Makes two faults with the same shares: one for frames towards the worker, one for frames from the worker."""
    none, bad = FrameFaults(), FrameFaults(**shares)
    return (
        Fault(f"requests {about}", _wire(bad, none), _SPLIT, before_streams=True),
        Fault(f"events {about}", _wire(none, bad), _SPLIT, before_streams=True),
    )


_DROP, _DOUBLE, _DELAY, _REORDER, _TRUNCATE = (
    _both_directions("lost, 2 in 10", drop=0.2),
    _both_directions("sent twice, 5 in 10", double=0.5),
    _both_directions("late by up to 0.3 s, 5 in 10", delay=0.5),
    _both_directions("overtaken, 3 in 10", reorder=0.3),
    _both_directions("cut short, 2 in 10", truncate=0.2),
)

FAULTS: dict[str, Fault] = {
    "none": Fault("no fault", _no_fault),
    "kill-worker": Fault("kill -9 of the worker", _kill_worker),
    "kill-worker-thrice": Fault("kill -9 of the worker, three times in one stream", _kill_worker_thrice),
    "kill-one-of-two": Fault("kill -9 of one worker of two", _kill_one_of_two, ServerPlan(("--workers", "2"))),
    "pause-worker": Fault("worker stopped for 1 s", _stop_worker(1.0)),
    "pause-worker-long": Fault(
        "worker stopped for 5 s: longer than the silence that means a lost worker", _stop_worker(5.0)
    ),
    "hang-worker": Fault("worker stopped for ever", _hang_worker, ServerPlan(("--stall-timeout", "3"))),
    "kill-frontend": Fault("kill -9 of one frontend of two", _kill_frontend, may_cut=True),
    "pause-frontend": Fault("a frontend stopped for 1.5 s", _stop_frontend(1.5)),
    "pause-frontend-long": Fault("a frontend stopped beyond its lease", _stop_frontend(4.0), ServerPlan(_LEASE)),
    "lose-requests": _DROP[0],
    "lose-events": _DROP[1],
    "double-requests": _DOUBLE[0],
    "double-events": _DOUBLE[1],
    "delay-requests": _DELAY[0],
    "delay-events": _DELAY[1],
    "reorder-requests": _REORDER[0],
    "reorder-events": _REORDER[1],
    "truncate-requests": _TRUNCATE[0],
    "truncate-events": _TRUNCATE[1],
    "bad-wire": Fault("all frame faults, both ways", _wire(_ALL, _ALL, altered=60), _SPLIT, before_streams=True),
    "cut-wire": Fault("nothing passes for longer than the lease", _cut_wire, ServerPlan(_LEASE, split=True)),
    "bad-wire-and-kill": Fault("all frame faults, and kill -9", _bad_wire_and_kill, _SPLIT, before_streams=True),
    "little-memory": Fault("a K/V pool for six sequences", _no_fault, ServerPlan(("--kv-cache-gb", "0.006"))),
    "drain": Fault("SIGTERM", _drain, stops_server=True),
    "drain-everyone": Fault("SIGTERM to every process", _drain_everyone, stops_server=True),
    "drain-at-once": Fault(
        "SIGTERM, no time to finish", _drain, ServerPlan(("--drain-timeout", "0.2")), stops_server=True
    ),
    **bad_clients.FAULTS,
    **environment.FAULTS,
    **remote_host.FAULTS,
}
