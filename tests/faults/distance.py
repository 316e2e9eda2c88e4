"""Faults of the network between hosts, over real TCP with CURVE keys: a frontend in a namespace of its own.

Half of the clients ask that frontend, through a wire of theirs that stays whole; the others ask one beside the worker.
"""

import asyncio
import os
import random
import signal
import time

import httpx

from tests.faults.fault import Fault, Healed, Strike
from tests.faults.site import Plan, Site, Stats

NOTICED_S = 10.0  # for a frontend that is cut off to say so; it should take 2 s
LEASE_S = 2.0


def _both(stats: Stats) -> bool:
    return len(stats["frontends"]) == 2


def _cut(seconds: float) -> Strike:
    """What is sent meanwhile vanishes, and nobody is told."""

    async def strike(site: Site, dice: random.Random) -> Healed:
        assert site.host is not None
        end = time.monotonic() + seconds
        site.host.cut()
        try:
            if seconds > LEASE_S:
                await _lonely(site)
            await asyncio.sleep(end - time.monotonic())
        finally:
            site.host.mend()
        return _both

    return strike


async def _lonely(site: Site) -> None:
    """The frontend says that it cannot serve, and why; the worker has done with it, and serves the other one."""
    deadline = time.monotonic() + NOTICED_S
    while (answer := await site.readiness(site.urls[-1])).status_code == 200:
        assert time.monotonic() < deadline, "a frontend that is cut off calls itself ready"
        await asyncio.sleep(0.05)
    assert answer.status_code == 503 and "lost" in answer.text, answer.text
    await site.until(lambda stats: len(stats["frontends"]) == 1, NOTICED_S)
    assert (await site.readiness(site.url)).status_code == 200, "the other frontend is not ready"


async def _kill(site: Site, dice: random.Random) -> Healed:
    """And start another in its place, which has to greet the worker anew."""
    victim = site.roots[-1]
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.to_thread(victim.wait)
    assert site.restart is not None
    site.restart()
    await site.until(lambda stats: _both(stats) and victim.pid not in {peer["pid"] for peer in stats["frontends"]})
    await site.until_ready()
    near, far = [await _answer(url) for url in site.urls]
    assert near == far, f"the new frontend answers {far!r} instead of {near!r}"
    return _both


async def _answer(url: str) -> str:
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 50, "temperature": 0, "seed": 1}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return str((await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"])


_PLAN = Plan(("--lease-timeout", f"{LEASE_S:g}"), distant=True)

FAULTS = {
    "other-host": Fault("a frontend on another host, cut off for 5 s: beyond its lease", _cut(5.0), _PLAN),
    "other-host-blip": Fault("the same, for 1 s: within its lease", _cut(1.0), _PLAN),
    "other-host-long": Fault("the same, for 40 s: both ends have hung up", _cut(40.0), _PLAN),
    "other-host-kill": Fault("kill -9 of a frontend on another host, and a new one", _kill, _PLAN, cuts=True),
}
