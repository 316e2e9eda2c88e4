"""Injects one fault several times into streams in flight and counts what every client received."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from tests.faults.clients import Call, Outcome, mixed_calls, send_all, sequences
from tests.faults.fault import Fault
from tests.faults.server import ResourceUsage, ServerUnderTest, running
from tests.patience import PATIENCE_S

SETTLE_S = 60.0  # time limit for connections to close and memory to settle


@dataclass(slots=True)
class Row:
    """How the streams of one or more rounds ended."""

    fault: str
    streams: int = 0
    identical: int = 0
    errors: int = 0  # streams that ended in an explicit error, or were cut because their frontend was killed
    lost: int = 0  # streams that hung, or stopped without an end marker
    wrong: int = 0  # streams whose text, ids, usage or finish differ from the run without faults
    leaked: int = 0  # pages still owned at the end
    recovery_s: float = 0.0  # the longest time from the end of a fault to a recovered server
    pauses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # explanations of failures
    explicit_errors: list[str] = field(default_factory=list)  # texts of the explicit errors

    @property
    def good(self) -> bool:
        return not (self.lost or self.wrong or self.leaked or self.notes)

    def judge(self, seen: Sequence[Outcome], expected: Sequence[Outcome], *, may_cut: bool) -> None:
        for i, (one, reference) in enumerate(zip(seen, expected, strict=True)):
            self.streams += 1
            if one.end == "whole":
                same = one.answer == reference.answer
                self.identical += same
                self.wrong += not same
                message = "" if same else f"stream {i} differs: {one.answer!r} instead of {reference.answer!r}"
            else:
                allowed = one.end == "error" or (one.end == "cut" and may_cut)
                self.errors += allowed
                self.lost += not allowed
                message = f"stream {i} {one.end}: {one.words}"
                if allowed:
                    self.explicit_errors.append(message[:500])
                    message = ""
            if message:
                self.notes.append(message[:500])
            if one.pause:
                self.pauses.append(one.pause)

    def figures(self) -> dict[str, Any]:
        percentiles = quantiles(self.pauses, n=100) if len(self.pauses) > 1 else [0.0] * 99
        return {
            "fault": self.fault, "streams": self.streams, "identical": self.identical, "errors": self.errors,
            "lost": self.lost, "wrong": self.wrong, "leaked pages": self.leaked,
            "recovery s": round(self.recovery_s, 1), "pause p50 s": round(percentiles[49], 2),
            "p99 s": round(percentiles[98], 2),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a trial: number of streams, least tokens of a stream, number of repetitions."""

    streams: int = 32
    length: int = 150
    rounds: int = 1
    seed: int = 0


def trial(name: str, fault: Fault, size: Size = Size()) -> Row:
    """Starts a server, runs without faults, then injects the fault `size.rounds` times.

    The row's `notes` explain failures.
    """
    row, rng, calls = Row(name), random.Random(size.seed), mixed_calls(size.streams, size.length)
    try:
        with running(fault.plan) as server:
            asyncio.run(_rounds(row, fault, server, calls, rng, size.rounds))
    except AssertionError as error:
        row.notes.append(str(error))
    return row


async def _rounds(
    row: Row, fault: Fault, server: ServerUnderTest, calls: list[Call], rng: random.Random, rounds: int
) -> None:
    expected, before = await without_faults(server, calls)
    for _ in range(rounds):
        await one_round(row, fault, server, calls, expected, before, rng)


async def without_faults(server: ServerUnderTest, calls: list[Call]) -> tuple[list[Outcome], ResourceUsage]:
    """Returns what clients receive without a fault, and the resources of the server after they have left."""
    expected = await send_all(server.urls, calls, PATIENCE_S)
    failed = [one for one in expected if one.end != "whole"]
    assert not failed, f"without_faults: {failed}"
    await server.until_idle()
    return expected, server.resource_usage()


async def one_round(
    row: Row,
    fault: Fault,
    server: ServerUnderTest,
    calls: list[Call],
    expected: list[Outcome],
    before: ResourceUsage,
    rng: random.Random,
    step_s: float | None = None,
) -> None:
    seen = await inject_under_load(row, fault, server, calls, rng, step_s)
    row.judge(seen, expected, may_cut=fault.may_cut)
    await (_ended(row, server) if fault.stops_server else settled(row, server, before))


async def inject_under_load(
    row: Row, fault: Fault, server: ServerUnderTest, calls: list[Call], rng: random.Random, step_s: float | None
) -> list[Outcome]:
    """Returns what clients received while the fault was injected.

    A fault with `before_streams` begins before the calls. Another fault comes while calls are in flight: all of them
    if the test can stop or slow the worker. step_s: as in ServerUnderTest.slowly()
    """
    already = asyncio.create_task(fault.inject(server, rng)) if fault.before_streams else None
    await asyncio.sleep(0.05)
    in_flight = 1 if server.hold is None else len(calls) if step_s else sum(map(sequences, calls))
    try:
        with server.slowly(step_s):
            sending = asyncio.create_task(send_all(server.urls, calls, PATIENCE_S))
            if already is None:
                await server.until(lambda s: s["running"] + s["waiting"] >= in_flight and s["running"])
                await asyncio.sleep(rng.uniform(0.1, 0.3))
            recovered = await (already or fault.inject(server, rng))
        fault_over = time.monotonic()
        if not fault.stops_server:
            await server.until(recovered)
            await server.until_ready()
            row.recovery_s = max(row.recovery_s, time.monotonic() - fault_over)
    except AssertionError as error:
        row.notes.append(str(error))
    return await sending


async def settled(row: Row, server: ServerUnderTest, before: ResourceUsage) -> None:
    """Waits until the server is idle and records every resource that has grown."""
    try:
        await server.until_idle(SETTLE_S)
    except AssertionError as error:
        row.notes.append(str(error))
    deadline = time.monotonic() + SETTLE_S
    growth, owned = server.resource_usage().growth(before), await _owned_pages(server)
    while (growth or owned) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        growth, owned = server.resource_usage().growth(before), await _owned_pages(server)
    row.leaked += owned
    if growth:
        row.notes.append(growth)


async def _owned_pages(server: ServerUnderTest) -> int:
    """What the frontend that answers was last told, which may be older than what another one has said before."""
    return int((await server.stats())["pages"]["owned"])


async def _ended(row: Row, server: ServerUnderTest) -> None:
    code = await asyncio.to_thread(server.processes[0].wait, PATIENCE_S)
    if code:
        row.notes.append(f"exit code {code}")


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines: list[str] = []
    for row in rows:
        figures = row.figures()
        if not lines:
            lines = ["| " + " | ".join(figures) + " |", "|---" + "|--:" * (len(figures) - 1) + "|"]
        lines.append("| " + " | ".join(str(value) for value in figures.values()) + " |")
    return "\n".join(lines)
