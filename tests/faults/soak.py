"""Mixed load without a pause and a fault every now and then, for as long as told; the server must end as it began."""

import asyncio
import random
import time

from tests.faults.faults import FAULTS
from tests.faults.load import Call, Seen, ask_all, mixture
from tests.faults.site import Plan, Site, running
from tests.faults.trial import PATIENCE_S, Row, Size, settled

EVERY_S = 30.0
CHOICE = ("kill-worker", "kill-frontend", "pause-worker", "pause-worker-long", "pause-frontend", "rude-clients")


def soak(seconds: float, size: Size) -> tuple[Row, list[str]]:
    """All in one row, and what was measured at the start and at the end, in words."""
    row, calls = Row(f"soak of {seconds:g} s"), mixture(size.streams, size.length)
    told: list[str] = []
    try:
        with running(Plan()) as site:
            asyncio.run(_soak(row, told, site, calls, random.Random(size.seed), seconds))
    except AssertionError as error:
        row.notes.append(str(error))
    return row, told


async def _soak(row: Row, told: list[str], site: Site, calls: list[Call], dice: random.Random, seconds: float) -> None:
    expected = await ask_all(site.urls, calls, PATIENCE_S)
    await _undisturbed(row, told, site, calls, expected, "at the start")
    before, end = site.footprint(), time.monotonic() + seconds
    striking = asyncio.create_task(_strike(row, site, dice, end))
    while time.monotonic() < end:
        row.judge(await ask_all(site.urls, calls, PATIENCE_S), expected, cuts=True)
        await site.until_ready()
    await striking
    await settled(row, site, before)
    await _undisturbed(row, told, site, calls, expected, "at the end")


async def _strike(row: Row, site: Site, dice: random.Random, end: float) -> None:
    while time.monotonic() + EVERY_S < end:
        await asyncio.sleep(EVERY_S - 10 + dice.uniform(0, 10))
        try:
            healed = await FAULTS[dice.choice(CHOICE)].strike(site, dice)
            over = time.monotonic()
            await site.until(healed)
            await site.until_ready()
            row.recovery_s = max(row.recovery_s, time.monotonic() - over)
        except AssertionError as error:
            row.notes.append(str(error))


async def _undisturbed(
    row: Row, told: list[str], site: Site, calls: list[Call], expected: list[Seen], when: str
) -> None:
    began = time.monotonic()
    seen = await ask_all(site.urls, calls, PATIENCE_S)
    lasted = time.monotonic() - began
    row.judge(seen, expected, cuts=False)
    await site.until_idle()
    latency, size = (await site.stats())["latency"], site.footprint()
    told.append(
        f"{when}: {size.rss_mb:.0f} MB, {size.fds} fds, {size.processes} processes; "
        f"{len(calls)} streams in {lasted:.1f} s; "
        + ", ".join(f"{name} p50 {1e3 * q['p50']:.0f} p99 {1e3 * q['p99']:.0f} ms" for name, q in latency.items())
    )
