"""Everything that is done to a server while it serves: to its processes, to the wire between them, and from outside."""

import asyncio
import os
import random
import signal

import psutil

from tests.faults import distance, rude, surroundings
from tests.faults.fault import Fault, Healed, Strike, at_once
from tests.faults.proxy import Mischief
from tests.faults.site import Plan, Site

_ALL = Mischief(drop=0.1, double=0.1, delay=0.2, reorder=0.1, truncate=0.1)


async def _kill_worker(site: Site, dice: random.Random) -> Healed:
    pid = await site.worker()
    os.kill(pid, signal.SIGKILL)
    if site.restart:
        site.restart()
    return lambda stats: stats["worker"]["pid"] != pid and stats["worker"]["state"] == "ready"


async def _kill_one_of_two(site: Site, dice: random.Random) -> Healed:
    busiest = max((await site.stats())["workers"], key=lambda worker: worker["streams"])
    os.kill(busiest["pid"], signal.SIGKILL)
    return lambda stats: all(one["ready"] and one["pid"] != busiest["pid"] for one in stats["workers"])


async def _kill_worker_thrice(site: Site, dice: random.Random) -> Healed:
    for _ in range(2):
        await site.until(await _kill_worker(site, dice))
        await site.until_ready()
        await site.until(lambda stats: stats["throughput"]["generation"] > 0 and stats["running"] > 0)
    return await _kill_worker(site, dice)


def _stop_worker(seconds: float) -> Strike:
    async def strike(site: Site, dice: random.Random) -> Healed:
        await _stop(await site.worker(), seconds)
        return at_once

    return strike


async def _hang_worker(site: Site, dice: random.Random) -> Healed:
    pid = await site.worker()
    os.kill(pid, signal.SIGSTOP)
    return lambda stats: stats["worker"]["pid"] != pid and stats["worker"]["state"] == "ready"


async def _busiest(site: Site) -> int:
    """The pid of the frontend with the most connections."""
    return max(await site.frontends(), key=lambda pid: len(psutil.Process(pid).net_connections("tcp")))


async def _kill_frontend(site: Site, dice: random.Random) -> Healed:
    victim = await _busiest(site)
    os.kill(victim, signal.SIGKILL)
    return lambda s: len(s["frontends"]) == 2 and victim not in {peer["pid"] for peer in s["frontends"]}


def _stop_frontend(seconds: float) -> Strike:
    async def strike(site: Site, dice: random.Random) -> Healed:
        await _stop(await _busiest(site), seconds)
        return lambda stats: len(stats["frontends"]) == 2

    return strike


async def _stop(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def _wire(requests: Mischief, events: Mischief, touched: int = 0) -> Strike:
    """For three seconds, and until so many frames were touched."""

    async def strike(site: Site, dice: random.Random) -> Healed:
        assert site.proxy is not None
        site.proxy.requests, site.proxy.events = requests, events
        await asyncio.sleep(3.0)
        while site.proxy.touched < touched:
            await asyncio.sleep(0.05)
        site.proxy.calm()
        return at_once

    return strike


async def _bad_wire_and_kill(site: Site, dice: random.Random) -> Healed:
    breaking = asyncio.create_task(_wire(_ALL, _ALL)(site, dice))
    await asyncio.sleep(1.5)
    healed = await _kill_worker(site, dice)
    await breaking
    return healed


async def _drain(site: Site, dice: random.Random) -> Healed:
    site.roots[0].send_signal(signal.SIGTERM)
    return at_once


async def _drain_everyone(site: Site, dice: random.Random) -> Healed:
    """As whoever stops all processes of a service: those who are told by the launcher, too, were told before."""
    launcher, *children = site.family()
    for child in children:
        child.terminate()
    await asyncio.sleep(0.2)
    launcher.terminate()
    return at_once


async def _nothing(site: Site, dice: random.Random) -> Healed:
    return at_once


async def _cut_wire(site: Site, dice: random.Random) -> Healed:
    """Nothing passes for longer than the lease runs."""
    assert site.proxy is not None
    gone = Mischief(drop=1.0)
    site.proxy.requests = site.proxy.events = gone
    await asyncio.sleep(4.0)
    site.proxy.calm()
    return lambda stats: len(stats["frontends"]) == 2


_SPLIT = Plan(split=True)
_LEASE = ("--lease-timeout", "2")


def _mischief(about: str, **shares: float) -> tuple[Fault, Fault]:
    """Towards the worker, and from it."""
    calm, bad = Mischief(), Mischief(**shares)
    return (
        Fault(f"requests {about}", _wire(bad, calm), _SPLIT, early=True),
        Fault(f"events {about}", _wire(calm, bad), _SPLIT, early=True),
    )


_DROP, _DOUBLE, _DELAY, _REORDER, _TRUNCATE = (
    _mischief("lost, 2 in 10", drop=0.2),
    _mischief("sent twice, 5 in 10", double=0.5),
    _mischief("late by up to 0.3 s, 5 in 10", delay=0.5),
    _mischief("overtaken, 3 in 10", reorder=0.3),
    _mischief("cut short, 2 in 10", truncate=0.2),
)

FAULTS: dict[str, Fault] = {
    "none": Fault("nothing", _nothing),
    "kill-worker": Fault("kill -9 of the worker", _kill_worker),
    "kill-worker-thrice": Fault("kill -9 of the worker, three times in one stream", _kill_worker_thrice),
    "kill-one-of-two": Fault("kill -9 of one worker of two", _kill_one_of_two, Plan(("--workers", "2"))),
    "pause-worker": Fault("worker stopped for 1 s", _stop_worker(1.0)),
    "pause-worker-long": Fault("worker stopped for 5 s: beyond the silence", _stop_worker(5.0)),
    "hang-worker": Fault("worker stopped for good", _hang_worker, Plan(("--stall-timeout", "3"))),
    "kill-frontend": Fault("kill -9 of one frontend of two", _kill_frontend, cuts=True),
    "pause-frontend": Fault("a frontend stopped for 1.5 s", _stop_frontend(1.5)),
    "pause-frontend-long": Fault("a frontend stopped beyond its lease", _stop_frontend(4.0), Plan(_LEASE)),
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
    "bad-wire": Fault("all of that both ways", _wire(_ALL, _ALL, touched=60), _SPLIT, early=True),
    "cut-wire": Fault("nothing passes for longer than the lease", _cut_wire, Plan(_LEASE, split=True)),
    "bad-wire-and-kill": Fault("all of that, and kill -9", _bad_wire_and_kill, _SPLIT, early=True),
    "little-memory": Fault("a K/V pool for six sequences", _nothing, Plan(("--kv-cache-gb", "0.006"))),
    "drain": Fault("SIGTERM", _drain, ends=True),
    "drain-everyone": Fault("SIGTERM to every process", _drain_everyone, ends=True),
    "drain-at-once": Fault("SIGTERM, no time to finish", _drain, Plan(("--drain-timeout", "0.2")), ends=True),
    **rude.FAULTS,
    **surroundings.FAULTS,
    **distance.FAULTS,
}
