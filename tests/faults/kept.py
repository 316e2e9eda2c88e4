"""Faults of a server that keeps answers: what happens to each kind of kept answer, as rows of a table.

Answers are in flight when a fault begins, and slow. After the fault the worker computes at its own speed, and the
clients of kept_clients.py come back until all answers have ended.
"""

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from tests.adapters import draw_adapter
from tests.faults.kept_clients import (
    ADAPTER,
    AWAY_S,
    FORMS,
    KINDS,
    Asked,
    KeptClients,
    Received,
    all_asked,
    undisturbed,
)
from tests.faults.server import ServerPlan, ServerUnderTest, running
from tests.images import seeing_checkpoint
from tests.patience import PATIENCE_S

STEP_S = 0.05  # of a worker before and while there is a fault
FULL_S = 4.0  # how long the store cannot be written
PAGE = 4096  # bytes of a page of the file
SPARE = 256 << 10  # bytes that are left on the disk of the store when it is filled
FULL = "answers are not kept, but given"  # a line in the log of a server that cannot write its store
STORE = "kept"  # the folder of the store, in the home folder of the server


@dataclass(frozen=True, slots=True)
class Model:
    """A model that sees images, and an adapter of it."""

    base: Path
    adapter: Path

    def plan(self, fault: "KeptFault") -> ServerPlan:
        flags = (
            "--chat-template", "", "--dtype", "float32", "--lora-modules", f"{ADAPTER}={self.adapter}",
            "--kv-cache-gb", "0.05", "--resume-window", "600", *fault.flags,
        )  # fmt: skip
        return ServerPlan(flags, held=True, prepare=fault.prepare, model=str(self.base))


def write_model(folder: Path) -> Model:
    base = seeing_checkpoint("qwen3_vl", folder / "model")
    return Model(base, draw_adapter(base, folder / "adapter", 1))


def plain_folder(home: Path) -> dict[str, str]:
    return {"SLUICE_STORE": str(home / STORE / "answers.db")}


def small_disk(home: Path) -> dict[str, str]:
    """Mounts a small file system for the store. Needs root."""
    (home / STORE).mkdir(mode=0o700)
    options = "size=16m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(home / STORE)], check=True)
    return plain_folder(home)


@dataclass(frozen=True, slots=True)
class Scene:
    server: ServerUnderTest
    clients: KeptClients

    @property
    def folder(self) -> Path:
        return self.server.folder.parent / STORE


Happen = Callable[[Scene], Awaitable[None]]


async def _clients_gone(scene: Scene) -> None:
    scene.clients.visits.leave()
    await asyncio.sleep(0.5)


async def _clients_come_and_go(scene: Scene) -> None:
    for _ in range(5):
        await _clients_gone(scene)
        await asyncio.sleep(AWAY_S)


def _kill(*roles: str) -> Happen:
    async def kill(scene: Scene) -> None:
        stats = await scene.server.stats()
        pids = {"worker": [stats["worker"]["pid"]], "frontend": [peer["pid"] for peer in stats["frontends"]]}
        for role in roles:
            for pid in pids[role]:
                os.kill(pid, signal.SIGKILL)

    return kill


async def _kill_one_frontend(scene: Scene) -> None:
    frontends = await scene.server.frontends()
    os.kill(max(frontends, key=lambda pid: frontends[pid]), signal.SIGKILL)


async def _pause_frontend(scene: Scene) -> None:
    """Stops a frontend until the others have taken over its answers, which it then learns."""
    frontends = await scene.server.frontends()
    pid = max(frontends, key=lambda pid: frontends[pid])
    os.kill(pid, signal.SIGSTOP)
    try:
        scene.clients.visits.leave()  # they would wait for the stopped process, and come to another one so
        await asyncio.sleep(9.0)
    finally:
        os.kill(pid, signal.SIGCONT)


async def _restart_frontends(scene: Scene) -> None:
    """Ends the frontends as a launcher does that replaces them, with no time to finish their answers."""
    for pid in await scene.server.frontends():
        os.kill(pid, signal.SIGTERM)


async def _restart_host(scene: Scene) -> None:
    tree = scene.server.process_tree()
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await asyncio.to_thread(psutil.wait_procs, tree, PATIENCE_S)
    await asyncio.to_thread(scene.server.processes[0].wait, PATIENCE_S)
    scene.server.start_again()


async def _fill(scene: Scene) -> None:
    """Fills the disk of the store but for SPARE bytes, waits until it is full, and makes room some seconds later."""
    filler = scene.folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(filler, max(0, filler.stat().st_size - SPARE))
    deadline = time.monotonic() + PATIENCE_S
    while FULL not in scene.server.log.read_text():
        assert time.monotonic() < deadline, "the disk was never full"
        await asyncio.sleep(0.05)
    scene.server.release()
    await asyncio.sleep(FULL_S)
    filler.unlink()


async def _read_only(scene: Scene) -> None:
    """Kills the frontends, of which the next ones find a read-only store; later it can be written again."""
    await _between_frontends(scene, lambda: _mount(scene.folder, "ro"))
    scene.server.release()
    await asyncio.sleep(FULL_S)
    _mount(scene.folder, "rw")


def _mount(folder: Path, how: str) -> None:
    """Mounts again. Waits for the threads of killed processes, which have files open a moment longer."""
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=False).returncode:
        assert time.monotonic() < deadline, f"{folder} cannot be mounted again"
        time.sleep(0.05)


async def _between_frontends(scene: Scene, work: Callable[[], None]) -> None:
    """Kills the frontends, does the work while nobody has the store open, and has the launcher start others."""
    launcher = scene.server.processes[0]
    launcher.send_signal(signal.SIGSTOP)
    pids = [psutil.Process(pid) for pid in await scene.server.frontends()]
    for process in pids:
        process.kill()
    while any(process.status() != psutil.STATUS_ZOMBIE for process in pids):
        await asyncio.sleep(0.02)
    try:
        work()
    finally:
        launcher.send_signal(signal.SIGCONT)
    await scene.server.until(lambda stats: len(stats["frontends"]) == 2)


async def _destroy(scene: Scene) -> None:
    """Writes over the whole file and its log."""
    for path in scene.folder.glob("answers.db*"):
        if not path.name.endswith("-shm"):
            with path.open("r+b") as file:
                file.write(b"\xa5no store at all\n" * (path.stat().st_size // 17))
    scene.server.release()
    await asyncio.sleep(FULL_S)
    scene.clients.give_up.set()


async def _delete(scene: Scene) -> None:
    """Deletes the file, and the logs of running streams, while the frontends have them open."""
    for path in scene.folder.glob("answers.db*"):
        path.unlink()
    scene.clients.forgotten.set()
    await asyncio.sleep(FULL_S)
    scene.server.release()


async def _damage(scene: Scene) -> None:
    """Kills the frontends, and changes a byte of each event before others start."""
    await asyncio.sleep(1.0)
    await _between_frontends(scene, lambda: _change_texts(scene.folder / "answers.db"))
    scene.server.release()


def _change_texts(path: Path) -> None:
    """Changes the texts in the file and in the logs of running streams."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    changed = 0
    for file in (path, *path.parent.glob(f"{path.name}-streams-*")):
        data = file.read_bytes()
        places = [found.end() for mark in (b'"content":"', b'"delta":"') for found in re.finditer(mark, data)]
        with file.open("r+b") as written:
            for at in places:
                if at % PAGE == 0 and file == path:  # not a text, but the head of the next page
                    continue
                written.seek(at)
                written.write(b"?")
                changed += 1
    assert changed, "no file has an event"


@dataclass(frozen=True, slots=True)
class KeptFault:
    """damages: whether the store itself is damaged, so that answers may be refused with an error of the store"""

    about: str
    happen: Happen
    prepare: Callable[[Path], dict[str, str]] = plain_folder
    damages: bool = False
    flags: tuple[str, ...] = ()


FAULTS: dict[str, KeptFault] = {
    "clients-gone": KeptFault("all clients leave, and are back after 1 s", _clients_gone),
    "clients-come-and-go": KeptFault("all clients leave five times, and are back after 1 s each", _clients_come_and_go),
    "frontend-killed": KeptFault("kill -9 of the frontend with the most streams, of two", _kill_one_frontend),
    "worker-killed": KeptFault("kill -9 of the worker", _kill("worker")),
    "both-killed": KeptFault("kill -9 of the worker and of both frontends", _kill("worker", "frontend")),
    "frontend-paused": KeptFault("a frontend is stopped until another one has its answers", _pause_frontend),
    "frontends-restarted": KeptFault(
        "SIGTERM to both frontends, with 0.2 s to finish", _restart_frontends, flags=("--drain-timeout", "0.2")
    ),
    "host-restarted": KeptFault("kill -9 of all processes, and a new start on the same store", _restart_host),
    "store-full": KeptFault("the disk of the store is full for 4 s", _fill, small_disk, damages=True),
    "store-read-only": KeptFault(
        "kill -9 of both frontends; the next ones find a read-only store for 4 s", _read_only, small_disk
    ),
    "store-destroyed": KeptFault("all bytes of the file are written over", _destroy, damages=True),
    "store-deleted": KeptFault("the store is deleted with its logs", _delete, damages=True),
    "store-damaged": KeptFault("some bytes of texts are changed, and kill -9 of both frontends", _damage, damages=True),
}


@dataclass(slots=True)
class KeptRow:
    """What became of the answers of one form, under one fault."""

    fault: str
    form: str
    identical: dict[str, int] = field(default_factory=dict)  # by kind
    asked: dict[str, int] = field(default_factory=dict)
    errors: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)

    def judge(self, asked: Asked, received: Received, expected: object, *, damages: bool) -> None:
        same = received.end == "whole" and received.answer == expected
        allowed = received.end == "error" and damages
        self.asked[asked.kind] = self.asked.get(asked.kind, 0) + 1
        self.identical[asked.kind] = self.identical.get(asked.kind, 0) + same
        self.errors += allowed
        self.lost += received.end != "whole" and not allowed
        self.wrong += received.end == "whole" and not same
        self.doubled += bool(received.doubled)
        if not same or received.doubled:
            self.notes.append(f"{asked.id} {received.end}: {received.words} {received.doubled}"[:500])
        if received.end == "whole" and not same:
            self.notes.append(f"{asked.id}: {received.answer!r} instead of {expected!r}"[:800])

    def figures(self) -> dict[str, str]:
        cells = {kind: f"{self.identical[kind]} of {self.asked[kind]}" if kind in self.asked else "" for kind in KINDS}
        counts = {name: str(getattr(self, name)) for name in ("errors", "lost", "doubled", "wrong")}
        return {"fault": self.fault, "form": self.form, **cells, **counts}


class HasFigures(Protocol):
    """A row of a table: its cells by the names of their columns."""

    def figures(self) -> dict[str, str]: ...


def table(rows: Sequence[HasFigures]) -> str:
    """Returns the rows in Markdown."""
    names = list(rows[0].figures())
    head = ["| " + " | ".join(names) + " |", "|---|---" + "|--:" * (len(names) - 2) + "|"]
    return "\n".join(head + ["| " + " | ".join(row.figures().values()) + " |" for row in rows])


async def disturbed(
    name: str, server: ServerUnderTest, asked: Sequence[Asked], expected: Mapping[Asked, object], run: str
) -> list[KeptRow]:
    """Asks for the answers, has the fault happen when all have begun, and returns a row for each form."""
    fault, clients = FAULTS[name], KeptClients(server.url, run)
    rows = {form: KeptRow(name, form) for form in FORMS if any(one.form == form for one in asked)}
    awaited = {one.id for one in asked if one.form != "batch"} | ({"batch"} if "batch" in rows else set())
    with server.slowly(STEP_S):
        receiving = asyncio.create_task(clients.receive(asked))
        deadline = time.monotonic() + PATIENCE_S
        while not clients.visits.begun >= awaited and not receiving.done():
            assert time.monotonic() < deadline, f"not begun: {awaited - clients.visits.begun}"
            await asyncio.sleep(0.02)
        await fault.happen(Scene(server, clients))
    for one, received in (await receiving).items():
        rows[one.form].judge(one, received, expected[one], damages=fault.damages)
    return list(rows.values())


def trial(name: str, model: Model, copies: int, tokens: int) -> list[KeptRow]:
    """Starts a server, and disturbs it once."""
    asked = all_asked(copies, tokens)
    with running(model.plan(FAULTS[name])) as server:
        expected = asyncio.run(undisturbed(server.url, asked))
        return asyncio.run(disturbed(name, server, asked, expected, name))


def summary(rows: Sequence[KeptRow]) -> str:
    sums = Counter[str]()
    for row in rows:
        sums.update({name: getattr(row, name) for name in ("errors", "lost", "doubled", "wrong")})
        sums.update(asked=sum(row.asked.values()), identical=sum(row.identical.values()))
    return ", ".join(f"{sums[name]} {name}" for name in ("asked", "identical", "errors", "lost", "doubled", "wrong"))
