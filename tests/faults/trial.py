"""One fault, a number of times: streams in flight, the blow, and the count of what every client was told."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from tests.faults.fault import Fault
from tests.faults.load import Call, Seen, ask_all, mixture, sequences
from tests.faults.site import Footprint, Site, running
from tests.patience import PATIENCE_S

SETTLE_S = 60.0  # at most, for connections to be closed and memory to be counted


@dataclass(slots=True)
class Row:
    """What became of the streams of one or more rounds."""

    fault: str
    streams: int = 0
    identical: int = 0
    errors: int = 0  # ended in an explicit error; a connection cut where its frontend was killed is one
    lost: int = 0  # ended without a word, or hung
    wrong: int = 0  # text, ids, usage or finish differ from the undisturbed run
    leaked: int = 0  # pages owned at the end
    recovery_s: float = 0.0  # longest, from the end of the harm to a server that is whole
    pauses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is wrong
    said: list[str] = field(default_factory=list)  # the explicit errors

    @property
    def good(self) -> bool:
        return not (self.lost or self.wrong or self.leaked or self.notes)

    def judge(self, seen: Sequence[Seen], expected: Sequence[Seen], *, cuts: bool) -> None:
        for i, (one, reference) in enumerate(zip(seen, expected, strict=True)):
            self.streams += 1
            if one.end == "whole":
                same = one.answer == reference.answer
                self.identical += same
                self.wrong += not same
                told = "" if same else f"stream {i} differs: {one.answer!r} instead of {reference.answer!r}"
            else:
                excused = one.end == "error" or (one.end == "cut" and cuts)
                self.errors += excused
                self.lost += not excused
                told = f"stream {i} {one.end}: {one.words}"
                if excused:
                    self.said.append(told[:500])
                    told = ""
            if told:
                self.notes.append(told[:500])
            if one.pause:
                self.pauses.append(one.pause)

    def figures(self) -> dict[str, Any]:
        cuts = quantiles(self.pauses, n=100) if len(self.pauses) > 1 else [0.0] * 99
        return {
            "fault": self.fault, "streams": self.streams, "identical": self.identical, "errors": self.errors,
            "lost": self.lost, "wrong": self.wrong, "leaked pages": self.leaked,
            "recovery s": round(self.recovery_s, 1), "pause p50 s": round(cuts[49], 2), "p99 s": round(cuts[98], 2),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Of a trial: how many streams, how long each (in tokens, at least), how often."""

    streams: int = 32
    length: int = 150
    rounds: int = 1
    seed: int = 0


def trial(name: str, fault: Fault, size: Size = Size()) -> Row:
    """Starts a server, asks undisturbed, then breaks it as often as told. Explains what is wrong in `notes`."""
    row, dice, calls = Row(name), random.Random(size.seed), mixture(size.streams, size.length)
    try:
        with running(fault.plan) as site:
            asyncio.run(_rounds(row, fault, site, calls, dice, size.rounds))
    except AssertionError as error:
        row.notes.append(str(error))
    return row


async def _rounds(row: Row, fault: Fault, site: Site, calls: list[Call], dice: random.Random, rounds: int) -> None:
    expected, before = await undisturbed(site, calls)
    for _ in range(rounds):
        await one_round(row, fault, site, calls, expected, before, dice)


async def undisturbed(site: Site, calls: list[Call]) -> tuple[list[Seen], Footprint]:
    """What clients are told when nothing happens, and what the server occupies when they have gone."""
    expected = await ask_all(site.urls, calls, PATIENCE_S)
    failed = [one for one in expected if one.end != "whole"]
    assert not failed, f"undisturbed: {failed}"
    await site.until_idle()
    return expected, site.footprint()


async def one_round(
    row: Row,
    fault: Fault,
    site: Site,
    calls: list[Call],
    expected: list[Seen],
    before: Footprint,
    dice: random.Random,
    step_s: float | None = None,
) -> None:
    seen = await blow(row, fault, site, calls, dice, step_s)
    row.judge(seen, expected, cuts=fault.cuts)
    await (_ended(row, site) if fault.ends else settled(row, site, before))


async def blow(
    row: Row, fault: Fault, site: Site, calls: list[Call], dice: random.Random, step_s: float | None
) -> list[Seen]:
    """What clients were told whose server was struck.

    Where it can be held it is struck while all of the calls are under way; `step_s` as in Site.slowly().
    """
    early = asyncio.create_task(fault.strike(site, dice)) if fault.early else None
    await asyncio.sleep(0.05)
    many = 1 if site.hold is None else len(calls) if step_s else sum(map(sequences, calls))
    try:
        with site.slowly(step_s):
            asking = asyncio.create_task(ask_all(site.urls, calls, PATIENCE_S))
            if early is None:
                await site.until(lambda stats: stats["running"] + stats["waiting"] >= many and stats["running"])
                await asyncio.sleep(dice.uniform(0.1, 0.3))
            healed = await (early or fault.strike(site, dice))
        over = time.monotonic()
        if not fault.ends:
            await site.until(healed)
            await site.until_ready()
            row.recovery_s = max(row.recovery_s, time.monotonic() - over)
    except AssertionError as error:
        row.notes.append(str(error))
    return await asking


async def settled(row: Row, site: Site, before: Footprint) -> None:
    """Notes what did not become as it was before."""
    try:
        await site.until_idle(SETTLE_S)
    except AssertionError as error:
        row.notes.append(str(error))
    row.leaked += (await site.stats())["pages"]["owned"]
    deadline = time.monotonic() + SETTLE_S
    while (grown := site.footprint().grown(before)) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    if grown:
        row.notes.append(grown)


async def _ended(row: Row, site: Site) -> None:
    code = await asyncio.to_thread(site.roots[0].wait, PATIENCE_S)
    if code:
        row.notes.append(f"exit code {code}")


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines: list[str] = []
    for row in rows:
        figures = row.figures()
        if not lines:
            lines = ["| " + " | ".join(figures) + " |", "|---" + "|--:" * (len(figures) - 1) + "|"]
        lines.append("| " + " | ".join(str(value) for value in figures.values()) + " |")
    return "\n".join(lines)
