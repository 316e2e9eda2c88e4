"""Mixed load with a fault every 20 to 30 s, for a given time; at the end the server must be as it was at the start."""

import asyncio
import random
import time

from tests.faults.catalog import FAULTS
from tests.faults.clients import Call, Outcome, mixed_calls, send_all
from tests.faults.server import ServerPlan, ServerUnderTest, running
from tests.faults.trial import PATIENCE_S, Row, Size, settled

EVERY_S = 30.0
CHOICE = ("kill-worker", "kill-frontend", "pause-worker", "pause-worker-long", "pause-frontend", "rude-clients")


def soak(seconds: float, size: Size) -> tuple[Row, list[str]]:
    """Returns one row for all streams, and descriptions of the measurements at the start and at the end."""
    row, calls = Row(f"soak of {seconds:g} s"), mixed_calls(size.streams, size.length)
    measurements: list[str] = []
    try:
        with running(ServerPlan()) as server:
            asyncio.run(_soak(row, measurements, server, calls, random.Random(size.seed), seconds))
    except AssertionError as error:
        row.notes.append(str(error))
    return row, measurements


async def _soak(
    row: Row, measurements: list[str], server: ServerUnderTest, calls: list[Call], rng: random.Random, seconds: float
) -> None:
    expected = await send_all(server.urls, calls, PATIENCE_S)
    await _measure_without_faults(row, measurements, server, calls, expected, "at the start")
    before, end = server.resource_usage(), time.monotonic() + seconds
    injecting = asyncio.create_task(_inject_faults(row, server, rng, end))
    while time.monotonic() < end:
        row.judge(await send_all(server.urls, calls, PATIENCE_S), expected, may_cut=True)
        await server.until_ready()
    await injecting
    await settled(row, server, before)
    await _measure_without_faults(row, measurements, server, calls, expected, "at the end")


async def _inject_faults(row: Row, server: ServerUnderTest, rng: random.Random, end: float) -> None:
    while time.monotonic() + EVERY_S < end:
        await asyncio.sleep(EVERY_S - 10 + rng.uniform(0, 10))
        try:
            recovered = await FAULTS[rng.choice(CHOICE)].inject(server, rng)
            over = time.monotonic()
            await server.until(recovered)
            await server.until_ready()
            row.recovery_s = max(row.recovery_s, time.monotonic() - over)
        except AssertionError as error:
            row.notes.append(str(error))


async def _measure_without_faults(
    row: Row, measurements: list[str], server: ServerUnderTest, calls: list[Call], expected: list[Outcome], when: str
) -> None:
    began = time.monotonic()
    seen = await send_all(server.urls, calls, PATIENCE_S)
    lasted = time.monotonic() - began
    row.judge(seen, expected, may_cut=False)
    await server.until_idle()
    latency, size = (await server.stats())["latency"], server.resource_usage()
    measurements.append(
        f"{when}: {size.rss_mb:.0f} MB, {size.fds} fds, {size.processes} processes; "
        f"{len(calls)} streams in {lasted:.1f} s; "
        + ", ".join(f"{name} p50 {1e3 * q['p50']:.0f} p99 {1e3 * q['p99']:.0f} ms" for name, q in latency.items())
    )
