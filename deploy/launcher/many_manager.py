"""Carries out the decisions of the account. Each loaded model has one supervised worker process.

A model is unloaded in two steps, so that no request reaches a worker that is ending. First, the table says that the
model is unloading. When every frontend acts on this table and none has a request for the model, its worker is stopped.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.launcher.child import Child, ChildSpec
from deploy.launcher.child_command import CliError
from deploy.launcher.many_library import Librarian, progress_of
from deploy.launcher.many_plan import Account, Plan, Slot
from deploy.launcher.many_sizes import FetchFailed
from deploy.launcher.many_spare import Spare
from deploy.launcher.placement import WorkerPlacement
from deploy.launcher.supervisor import PERMANENT_FAILURES, Supervisor
from shared.config.declaration import ConfigError
from shared.launcher_messages import (
    SOCKET,
    Add,
    Ask,
    Copy,
    Create,
    Delete,
    Done,
    Download,
    Forget,
    Load,
    ModelState,
    Order,
    Pull,
    Reload,
    Reloaded,
    Seen,
    Sleep,
    State,
    Table,
    Unusable,
    frame,
    read_from_frontend,
)
from shared.model_library import library_file

# The control socket in the run folder: frontends say which models their requests need, and learn which are loaded.
#
# Each frontend has one connection. Its last report holds until its next report or until its connection ends, so a
# killed frontend keeps no model loaded. Only the user who runs the server can connect.

ANSWER_S = 5.0  # time limit for a frontend's answer to a table
MOST_BUFFERED = 64 << 20  # bytes that a frontend may leave unread before its connection is closed


@dataclass(eq=False, slots=True)
class _Frontend:
    writer: asyncio.StreamWriter
    seen: Seen
    behind_since: float | None = None  # when the oldest unanswered table was sent; None: all are answered


class Control:
    """The connections of all frontends."""

    def __init__(
        self,
        on_change: Callable[[], None],
        on_order: Callable[[Order], None],
        on_reload: Callable[[], Awaitable[str]],
        on_ask: Callable[[object, Ask], None] = lambda frontend, order: None,
        on_left: Callable[[object], None] = lambda frontend: None,
    ) -> None:
        """
        on_change: called when a frontend reports that its requests need other models
        on_reload: reads the table again and sends it; returns why this failed, else ""
        on_ask: called with a frontend and what it asks of the library; on_left: with one whose connection has ended
        """
        self._frontends: set[_Frontend] = set()
        self._on_change, self._on_order, self._on_reload = on_change, on_order, on_reload
        self._on_ask, self._on_left = on_ask, on_left
        self._downloads: dict[str, Download] = {}  # those that run
        self._table = Table(0, ())
        self._reloads: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, folder: Path) -> None:
        path = folder / SOCKET
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, path)
        finally:
            os.umask(before)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for one in list(self._frontends):
            one.writer.close()

    @property
    def connected(self) -> bool:
        """Whether any frontend is connected."""
        return bool(self._frontends)

    @property
    def used(self) -> set[str]:
        return {name for one in self._frontends for name in one.seen.used}

    @property
    def wanted(self) -> list[str]:
        return [name for one in self._frontends for name in one.seen.wanted]

    def send(self, table: Table) -> None:
        """Sends the table to all frontends."""
        self._table = table
        for one in list(self._frontends):
            self._send(one)

    def all_have_seen(self, version: int) -> bool:
        """Whether every frontend acts on this version of the table or a later one, or has not answered for ANSWER_S."""
        now = time.monotonic()
        return all(
            one.seen.version >= version or (one.behind_since is not None and now > one.behind_since + ANSWER_S)
            for one in self._frontends
        )

    def tell(self, download: Download) -> None:
        """Sends the progress of a download to all frontends, and to those that connect while it runs."""
        self._downloads.pop(download.name, None)
        if not download.ended:
            self._downloads[download.name] = download
        for one in list(self._frontends):
            if one.writer.transport.get_write_buffer_size() <= MOST_BUFFERED:
                one.writer.write(frame(download))

    def answer(self, frontend: object, done: Done) -> None:
        """Sends the answer to a ticket to the frontend that asked, if it is still connected."""
        for one in self._frontends:
            if one is frontend:
                one.writer.write(frame(done))

    def _send(self, one: _Frontend) -> None:
        if one.writer.transport.get_write_buffer_size() > MOST_BUFFERED:
            one.writer.close()
            return
        one.writer.write(frame(self._table))
        if one.behind_since is None:
            one.behind_since = time.monotonic()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one = _Frontend(writer, Seen(0))
        self._frontends.add(one)
        self._send(one)
        for download in self._downloads.values():
            writer.write(frame(download))
        try:
            with contextlib.suppress(EOFError, OSError, ValueError):
                while True:
                    message = await read_from_frontend(reader)
                    match message:
                        case Seen():
                            self._has_seen(one, message)
                        case Reload():
                            self._reload(one)
                        case Pull() | Add() | Create() | Copy() | Delete() | Forget():
                            self._on_ask(one, message)
                        case _:
                            self._on_order(message)
        finally:
            self._frontends.discard(one)
            writer.close()
            self._on_left(one)
            self._on_change()

    def _has_seen(self, one: _Frontend, seen: Seen) -> None:
        one.seen = seen
        if seen.version >= self._table.version:
            one.behind_since = None
        self._on_change()

    def _reload(self, one: _Frontend) -> None:
        async def run() -> None:
            one.writer.write(frame(Reloaded(await self._on_reload())))

        task = asyncio.create_task(run())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)


TICK_S = 0.1
MOST_PAUSE_S = 5.0
MOST_STARTS = 3  # if a worker never serves in this many starts, its model counts as failed


@dataclass(slots=True)
class _Process:
    """The worker of a model that is loaded or loading. child: None while its settings are prepared."""

    preparing: asyncio.Task[None] | None = None
    child: Child | None = None
    task: asyncio.Task[int] | None = None
    folder: str = ""
    stopped: bool = False
    unusable: str = ""  # why frontends cannot serve the model


@dataclass(slots=True)
class Manager:
    """The models of a server. `run` never ends by itself.

    make_spec: returns the spec of a model's worker
    """

    plan: Plan
    supervisor: Supervisor
    make_spec: Callable[[WorkerPlacement], ChildSpec]
    say: Callable[[str], None]
    spare: Spare = field(default_factory=Spare)
    _account: Account = field(init=False)
    _control: Control = field(init=False)
    _librarian: Librarian | None = None  # only with --allow-pull
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _processes: dict[Slot, _Process] = field(default_factory=dict)
    _epochs: dict[str, int] = field(default_factory=dict)  # model → number of processes that its earlier workers had
    _folders: dict[Slot, str] = field(default_factory=dict)
    _before_sleep: set[str] = field(default_factory=set)  # the models that were loaded before the sleep
    _fetching: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # model → its download from the hub
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _next_reading: "asyncio.Task[str] | None" = None  # reads the table when the present reading has ended
    _read_at: float = 0.0  # when the next reading may begin
    _asked: set[str] = field(default_factory=set)  # models that frontends asked to load although no request waits
    _table: Table = field(default_factory=lambda: Table(0, ()))
    # the monotonic clock's zero, in seconds since 1970
    _since_1970: float = field(default_factory=lambda: time.time() - time.monotonic())

    def __post_init__(self) -> None:
        plan = self.plan
        limits = plan.keep_alive, plan.most_models, plan.most_bytes
        self._account = Account(plan.entries, *limits, time.monotonic, plan.size_of)
        self._control = Control(self._wake.set, self._ordered, self._reload, self._ask, self._left)
        if plan.settings.models.allow_pull:
            self._librarian = Librarian(
                library_file(), lambda: self.plan.own_models, plan.hub, self._reload, self._control.answer,
                self._control.tell,
            )  # fmt: skip
        self._asked = {entry.name for entry in plan.entries if entry.preload}

    def start(self) -> asyncio.Task[None]:
        """Starts `run` in a task. If it fails, the server stops, because it can no longer load or unload models."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self.say(f"sluice serve: cannot manage the models: {task.exception()!r}")
                self.supervisor.request_stop(1)

        task = asyncio.create_task(self.run())
        task.add_done_callback(ended)
        return task

    async def run(self) -> None:
        await self._control.open(Path(self.plan.settings.wire.run_dir))
        try:
            while True:
                self._step()
                if self._account.asleep:
                    await self.spare.close()
                elif self._control.connected and not any(
                    slot.state == "loading" for slot in self._account.slots.values()
                ):
                    self.spare.prepare()  # only while no model loads, because loading needs the cores
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_S)
                self._wake.clear()
        finally:
            self._control.close()
            for task in self._fetching.values():
                task.cancel()
            if self._librarian is not None:
                self._librarian.close()
            await self.spare.close()

    def _ask(self, frontend: object, order: Ask) -> None:
        if self._librarian is not None:
            self._librarian.ask(frontend, order)
        elif not isinstance(order, Forget):
            self._control.answer(frontend, Done(order.ticket, "models cannot be pulled here", "not_allowed"))

    def _left(self, frontend: object) -> None:
        if self._librarian is not None:
            self._librarian.left(frontend)

    def _ordered(self, order: Order) -> None:
        if isinstance(order, Sleep):
            self._sleep(order.asleep)
            return
        slot = self._account.slots.get(order.name)
        if slot is None:
            return
        if isinstance(order, Load):
            self._asked.add(slot.name)
            if self.plan.hub.is_away(slot.entry.model):
                slot.failed_at = -math.inf
            else:
                self._account.ask(slot, explicitly=True)
        elif isinstance(order, Unusable):
            self._give_up(slot, order.reason)
        else:
            usual = self._account.keep_alive_of(slot.entry)
            slot.keep_alive = usual if order.seconds is None else order.seconds
        self._wake.set()

    def _give_up(self, slot: Slot, reason: str) -> None:
        """Ends the worker of a model that frontends cannot serve. The model has failed when the worker has ended."""
        if (process := self._processes.get(slot)) is not None and not process.stopped:
            process.unusable = process.unusable or reason
            if process.child is not None:
                process.child.stop()

    def _sleep(self, asleep: bool) -> None:
        account = self._account
        if asleep and not account.asleep:
            self._before_sleep = {slot.name for slot in account.slots.values() if slot.state in ("loading", "loaded")}
        elif not asleep and account.asleep:
            self._asked |= self._before_sleep
        account.asleep = asleep
        self._wake.set()

    async def _reload(self) -> str:
        """Reads the table again and sends it to frontends. If it cannot be read, changes nothing and returns why.

        All that ask during a reading share the next one. Between two readings is a pause as long as a reading, so that
        the other work of this process goes on.
        """
        if self._next_reading is None:
            self._next_reading = asyncio.create_task(self._read_again())
        return await asyncio.shield(self._next_reading)

    async def _read_again(self) -> str:
        async with self._reading:
            await asyncio.sleep(self._read_at - time.monotonic())
            self._next_reading, begun = None, time.monotonic()
            try:
                return await self._read_table()
            finally:
                ended = time.monotonic()
                self._read_at = ended + min(MOST_PAUSE_S, ended - begun)

    async def _read_table(self) -> str:
        try:
            planned = await asyncio.to_thread(self.plan.read_again)
            await asyncio.to_thread(planned.write)
        except (ConfigError, OSError) as error:
            return str(error)
        known = {entry.name for entry in self.plan.entries}
        self._asked |= {entry.name for entry in planned.entries if entry.preload and entry.name not in known}
        self.plan = planned
        self._account.replace(planned.entries)
        self._account.renew()
        self._publish(read=True)
        self._wake.set()
        return ""

    def _step(self) -> None:
        account, control = self._account, self._control
        for slot, process in list(self._processes.items()):
            self._observe(slot, process)
        self._asked &= account.slots.keys()
        away = self._away([*control.wanted, *self._asked])
        wanted = [name for name in control.wanted if name not in away]
        account.use(control.used, wanted)
        for name in self._asked - away:
            account.ask(account.slots[name])
        account.forget_unwanted([*wanted, *self._asked])
        while account.next_to_unload() is not None:
            pass
        self._stop_unused()
        while (next_slot := account.next_to_load()) is not None:
            self._load(next_slot)
        self._asked -= {slot.name for slot in account.slots.values() if slot.state in ("loading", "loaded", "failed")}
        self._publish()
        account.renew()  # last, so that frontends first learn which models are unloaded
        self._folders = {slot: folder for slot, folder in self._folders.items() if slot in account.slots.values()}

    def _away(self, names: Iterable[str]) -> set[str]:
        """Begins to fetch the models that are only on the hub, and returns the names of these models."""
        slots = self._account.slots
        away = {name for name in names if name in slots and self.plan.hub.is_away(slots[name].entry.model)}
        for name in away - self._fetching.keys():
            if self._account.may_be_tried(slots[name]) and not self._account.asleep:
                slots[name].state, slots[name].attempts = "unloaded", slots[name].attempts + 1
                self._fetching[name] = asyncio.create_task(self._fetch(name, slots[name].entry.model))
        return away

    async def _fetch(self, name: str, model: str) -> None:
        self.say(f"the model {name} is fetched from the hub")
        try:
            await self.plan.hub.fetch(model, lambda line: self._control.tell(progress_of(name, line)))
        except FetchFailed as error:
            self._control.tell(Download(name, "", error=str(error)))
            self._asked.discard(name)
            if (slot := self._account.slots.get(name)) is not None:
                self._account.failed(slot, str(error))
            self.say(f"the model {name} cannot be fetched: {error}")
        finally:
            del self._fetching[name]
            self._wake.set()

    def _observe(self, slot: Slot, process: _Process) -> None:
        """Records whether a worker has begun to serve, or has ended."""
        child, task = process.child, process.task
        if child is None or task is None:
            return
        if task.done():
            del self._processes[slot]
            self._epochs[slot.name] = self._epochs.get(slot.name, 0) + child.incarnation
            if process.stopped:
                self._unloaded(slot)
            else:
                self._account.failed(
                    slot, process.unusable or child.last_error or f"its worker ended with exit code {task.result()}"
                )
                self.say(f"the model {slot.name} cannot be served: {slot.reason}")
        elif slot.state == "loading" and child.spec.watchdog is not None and child.spec.watchdog.serving:
            child.mark_ready()
            self._account.loaded(slot)
            self.say(f"the model {slot.name} is loaded")

    def _unloaded(self, slot: Slot) -> None:
        slot.state, slot.announced, slot.keep_alive = "unloaded", 0, self._account.keep_alive_of(slot.entry)
        self.say(f"the model {slot.name} is unloaded")

    def _stop_unused(self) -> None:
        for slot, process in self._processes.items():
            if slot.state != "unloading" or not slot.announced or process.stopped or process.child is None:
                continue
            if slot.used:
                self._account.goes_on(slot)
            elif self._control.all_have_seen(slot.announced):
                process.stopped = True
                process.child.stop()

    def _load(self, slot: Slot) -> None:
        process = self._processes[slot] = _Process()
        process.preparing = asyncio.create_task(self._start(slot, process))

    async def _start(self, slot: Slot, process: _Process) -> None:
        try:
            settings = await asyncio.to_thread(self.plan.worker_settings, slot.entry)
            folder = Path(settings.wire.run_dir)
            folder.mkdir(mode=0o700, exist_ok=True)
        except (CliError, ConfigError, OSError) as error:
            del self._processes[slot]
            self._account.failed(slot, str(error).removeprefix("--model: "))
            self.say(f"the model {slot.name} cannot be served: {slot.reason}")
            return
        self._folders[slot] = settings.model.model
        plain = self.make_spec(WorkerPlacement(f"worker {slot.name}", f"worker-{folder.name}.heartbeat", settings, {}))
        # each process that serves on the model's sockets needs an epoch that no earlier one had
        before = self._epochs.get(slot.name, 0)
        spec = replace(plain, environment=lambda n: plain.environment(before + n), start=self.spare.start)
        if spec.watchdog is not None:
            spec.watchdog.start()
        process.child, process.task = self.supervisor.start_beside(
            spec,
            lambda child, code: (
                code in PERMANENT_FAILURES or (slot.state == "loading" and child.incarnation >= MOST_STARTS)
            ),
        )
        process.task.add_done_callback(lambda _: self._wake.set())
        if process.unusable:
            process.child.stop()

    def _publish(self, *, read: bool = False) -> None:
        """Sends the table to frontends if anything in it has changed. read: whether to send it even if nothing has
        changed, because it was read again"""
        models = tuple(self._state(slot) for slot in self._account.slots.values())
        before, asleep = self._table, self._account.asleep
        if read or (models, asleep) != (before.models, before.asleep):
            self._table = Table(before.version + 1, models, before.reading + read, asleep)
            self._control.send(self._table)
        for slot in self._account.slots.values():
            if slot.state == "unloading" and not slot.announced:
                slot.announced = self._table.version

    def _state(self, slot: Slot) -> ModelState:
        keep_alive = slot.keep_alive if slot.keep_alive < math.inf else None
        expires_at = None
        if slot.state == "loaded" and not slot.used and keep_alive is not None:
            expires_at = round(self._since_1970 + slot.used_at + keep_alive, 1)
        folder, reason = self._folders.get(slot, ""), slot.reason if slot.state == "failed" else ""
        state: State = "loading" if slot.name in self._fetching else slot.state
        return ModelState(
            slot.name, state, reason, folder, slot.nbytes, slot.attempts, keep_alive, expires_at
        )  # fmt: skip
