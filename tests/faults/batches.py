"""Batches whose processes are killed at random lines, through `/v1/batches` and through `sluice batch FILE`.

The output is compared with that of the same batch, undisturbed, line by line; only ids and times may differ.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.server import ROOT
from tests.faults.kept import FAULTS, Scene, plain_folder
from tests.faults.kept_clients import KeptClients
from tests.faults.server import ServerPlan, ServerUnderTest, running
from tests.patience import PATIENCE_S

ENDPOINT = "/v1/completions"
KILLS = ("worker-killed", "frontend-killed", "both-killed", "host-restarted")
WAYS = ("/v1/batches", "sluice batch")
LOOK_S = 0.02
CHANGING = ("id", "created")  # fields of a body that differ between two answers to the same request


def plan(model: str = "demo") -> ServerPlan:
    return ServerPlan(("--batch-lines", "2"), model=model, prepare=plain_folder)


def line(number: int, tokens: int) -> dict[str, Any]:
    """Returns a line of the input; every other one is sampled. All have a seed, because answers tell a drawn one."""
    prompt = [20 + number % 200, 30, number // 200 + 40]
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": number % 2,
        "seed": number,
    }
    return {"custom_id": f"id-{number}", "method": "POST", "url": ENDPOINT, "body": body}


def write_input(path: Path, lines: int, tokens: int) -> Path:
    path.write_text("".join(json.dumps(line(number, tokens)) + "\n" for number in range(lines)))
    return path


@dataclass
class BatchRow:
    """What became of a batch whose processes were killed. killed: how often, by kill"""

    way: str
    lines: int
    killed: Counter[str] = field(default_factory=Counter)
    identical: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.identical == self.lines and not (self.lost or self.doubled or self.wrong or self.notes)

    def judge(self, output: Sequence[str], expected: Sequence[str]) -> None:
        """Compares an output with that of the same batch, undisturbed. Both have a line of JSON for each line."""
        found, wanted = [json.loads(one) for one in output], [json.loads(one) for one in expected]
        counts = Counter(one["custom_id"] for one in found)
        answers = {one["custom_id"]: _compared(one) for one in found}
        for one in wanted:
            id = one["custom_id"]
            same = answers.get(id) == _compared(one)
            self.identical += same
            self.lost += not counts[id]
            self.doubled += counts[id] > 1
            self.wrong += counts[id] > 0 and not same
            if not same or counts[id] != 1:
                self.notes.append(f"{id}, {counts[id]} times: {answers.get(id)} instead of {_compared(one)}"[:500])
        if [one["custom_id"] for one in found] != [one["custom_id"] for one in wanted]:
            self.notes.append("the order of the output is not that of the input")

    def figures(self) -> dict[str, str]:
        kills = {name: str(self.killed[name]) for name in (*KILLS, "command-killed")}
        counts = {name: str(getattr(self, name)) for name in ("identical", "lost", "doubled", "wrong")}
        return {"way": self.way, "lines": str(self.lines), **kills, **counts}


def _compared(one: dict[str, Any]) -> Any:
    response = one["response"]
    body = {name: value for name, value in response["body"].items() if name not in CHANGING}
    return response["status_code"], body, one["error"]


class Killer:
    """Kills processes when so many lines have an outcome, once for each of `kills`."""

    def __init__(self, server: ServerUnderTest, kills: Sequence[str], lines: int, seed: int) -> None:
        """seed: draws at which lines; the last one is far enough from the end of the batch to be in time"""
        self._scene = Scene(server, KeptClients(server.url, ""))
        self._kills, self.killed = list(kills), Counter[str]()
        self._due = sorted(random.Random(seed).sample(range(lines // 20, lines * 4 // 5), len(kills)))

    async def look(self, completed: int, command: Callable[[], Awaitable[None]] | None = None) -> None:
        """Kills if it is due. command: kills the command that sends the lines, and begins it again"""
        if not self._due or completed < self._due[0]:
            return
        self._due.pop(0)
        kill = self._kills.pop(0)
        if kill == "command-killed":
            assert command is not None
            await command()
        else:
            await self._whole()
            await FAULTS[kill].happen(self._scene)
        self.killed[kill] += 1

    async def _whole(self) -> None:
        """Waits until /stats tells of living processes only, since it is asked which ones to kill."""
        server = self._scene.server
        await server.until_ready()
        await server.until(
            lambda stats: (
                len(stats["frontends"]) == 2
                and all(map(psutil.pid_exists, [stats["worker"]["pid"], *(one["pid"] for one in stats["frontends"])]))
            )
        )

    def assert_done(self) -> None:
        assert not self._kills, f"the batch ended before these kills: {self._kills}"


async def by_route(server: ServerUnderTest, source: Path, killer: Killer | None = None) -> list[str]:
    """Has the lines of a file answered by `/v1/batches`. Returns the lines of the output."""
    clients = KeptClients(server.url, "")
    files = {"file": (source.name, source.read_bytes())}
    file = await clients.asked("POST", "files", files=files, data={"purpose": "batch"})
    wanted = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    batch = await clients.asked("POST", "batches", json=wanted)
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(LOOK_S)
        batch = await clients.asked("GET", f"batches/{batch['id']}")
        if killer is not None:
            await killer.look(batch["request_counts"]["completed"])
    count = batch["request_counts"]["total"]
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}, batch
    left = (await server.stats())["batches"]
    assert not any(left[name] for name in ("batches", "lines_waiting", "lines_running")), left
    return await clients.lines_of(batch["output_file_id"])


async def by_command(server: ServerUnderTest, source: Path, killer: Killer) -> list[str]:
    """Has the lines of a file answered by `sluice batch`. Returns the lines of the output."""
    out = source.with_suffix(".out.jsonl")
    part = out.with_name(out.name + ".part")
    out.unlink(missing_ok=True)

    async def begun() -> asyncio.subprocess.Process:
        words = ["batch", str(source), "--out", str(out), "--url", server.url, "--concurrency", "2"]
        log = asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deploy.cli.main", *words, cwd=ROOT, stdout=log, stderr=log
        )

    command = await begun()

    async def again() -> None:
        nonlocal command
        command.kill()
        await command.wait()
        command = await begun()

    while command.returncode is None:
        await asyncio.sleep(LOOK_S)
        if part.exists():
            await killer.look(part.read_bytes().count(b"\n"), again)
    assert command.returncode == 0, f"`sluice batch` ended with {command.returncode}"
    return out.read_text().splitlines()


async def disturbed(
    way: str, server: ServerUnderTest, source: Path, expected: Sequence[str], kills: Sequence[str], seed: int
) -> BatchRow:
    """Has a batch answered while processes are killed, and returns its row."""
    killer = Killer(server, kills, len(expected), seed)
    answered = by_route if way == WAYS[0] else by_command
    async with asyncio.timeout(PATIENCE_S * (len(kills) + 1) + len(expected)):
        output = await answered(server, source, killer)
    killer.assert_done()
    row = BatchRow(way, len(expected), killer.killed)
    row.judge(output, expected)
    return row


def trial(
    model: str, folder: Path, lines: int, tokens: int, rounds: int, seed: int, ways: Sequence[str] = WAYS
) -> list[BatchRow]:
    """Starts a server, and disturbs a batch in each of these ways. rounds: how often there is each kill"""
    source = write_input(folder / "lines.jsonl", lines, tokens)
    kills = list(KILLS * rounds)
    random.Random(seed).shuffle(kills)
    middle = len(kills) // 2
    of_command = [*kills[:middle], *["command-killed"] * rounds, *kills[middle:]]
    with running(plan(model)) as server:
        expected = asyncio.run(by_route(server, source))
        return [
            asyncio.run(disturbed(way, server, source, expected, kills, seed))
            if way == WAYS[0]
            else asyncio.run(disturbed(way, server, source, expected, of_command, seed + 1))
            for way in ways
        ]
