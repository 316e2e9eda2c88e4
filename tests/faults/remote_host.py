"""Faults of the network between hosts, over real TCP with CURVE keys: one frontend runs in a network namespace.

Half of the clients use that frontend, over a link that stays intact; the others use a frontend beside the worker.
"""

import asyncio
import os
import random
import signal
import time

import httpx

from tests.faults.fault import Fault, Inject, Recovered
from tests.faults.server import ServerPlan, ServerUnderTest, Stats

NOTICED_S = 10.0  # time limit for an isolated frontend to report its isolation, which should take 2 s
LEASE_S = 2.0


def _both(stats: Stats) -> bool:
    return len(stats["frontends"]) == 2


def _cut(seconds: float) -> Inject:
    """Drops all packets between the hosts for some time; neither end gets an error."""

    async def inject(server: ServerUnderTest, rng: random.Random) -> Recovered:
        assert server.host is not None
        end = time.monotonic() + seconds
        server.host.cut()
        try:
            if seconds > LEASE_S:
                await _check_isolated(server)
            await asyncio.sleep(end - time.monotonic())
        finally:
            server.host.mend()
        return _both

    return inject


async def _check_isolated(server: ServerUnderTest) -> None:
    """Asserts that the isolated frontend is not ready and says why, and that the worker serves only the other one."""
    deadline = time.monotonic() + NOTICED_S
    while (answer := await server.readiness(server.urls[-1])).status_code == 200:
        assert time.monotonic() < deadline, "a frontend that is cut off calls itself ready"
        await asyncio.sleep(0.05)
    assert answer.status_code == 503 and "lost" in answer.text, answer.text
    await server.until(lambda stats: len(stats["frontends"]) == 1, NOTICED_S)
    assert (await server.readiness(server.url)).status_code == 200, "the other frontend is not ready"


async def _kill(server: ServerUnderTest, rng: random.Random) -> Recovered:
    """Kills the remote frontend and starts another one, which needs a new handshake."""
    victim = server.processes[-1]
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.to_thread(victim.wait)
    assert server.restart is not None
    server.restart()
    await server.until(lambda stats: _both(stats) and victim.pid not in {peer["pid"] for peer in stats["frontends"]})
    await server.until_ready()
    near, far = [await _answer(url) for url in server.urls]
    assert near == far, f"the new frontend answers {far!r} instead of {near!r}"
    return _both


async def _answer(url: str) -> str:
    body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 50, "temperature": 0, "seed": 1}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return str((await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"])


_PLAN = ServerPlan(("--lease-timeout", f"{LEASE_S:g}"), remote=True)

FAULTS = {
    "other-host": Fault("a frontend on another host, cut off for 5 s: beyond its lease", _cut(5.0), _PLAN),
    "other-host-blip": Fault("the same, for 1 s: within its lease", _cut(1.0), _PLAN),
    "other-host-long": Fault("the same, for 40 s: both ends have closed the connection", _cut(40.0), _PLAN),
    "other-host-kill": Fault("kill -9 of a frontend on another host, and a new one", _kill, _PLAN, may_cut=True),
}
