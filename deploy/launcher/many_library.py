"""Carries out what clients ask of the library with --allow-pull: fetch a model, name it, copy and remove names.

Equal pulls share one process, which ends when the last that waits for it has left. What it has fetched stays, so the
next pull continues. Changes of the library are made one after another.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from deploy.launcher.child_command import child_environment
from deploy.launcher.many_sizes import FetchFailed, HubModels, run_pull
from shared.config.declaration import ConfigError
from shared.gguf.config import config_of
from shared.gguf.container import Container
from shared.gguf.naming import GgufError
from shared.launcher_messages import Add, Ask, Copy, Create, Delete, Done, Download, Forget, Pull
from shared.model_library import (
    UPLOADS,
    Library,
    LibraryError,
    Pulled,
    change_library,
    library_file,
    plain_name,
    read_library,
    uploaded_file,
)
from shared.preset import Preset

MOST_PULLS = 4  # downloads at a time; each fetches with several connections
MOST_ASKED = 256  # unanswered tickets of one frontend
Asker = tuple[object, int]  # a frontend and its ticket
Answer = Callable[[object, Done], None]


@dataclass(eq=False, slots=True)
class _Download:
    """A running pull. line: its last progress, for frontends that connect later"""

    waiting: set[Asker] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class Librarian:
    """The library of a server with --allow-pull.

    file: the library's file
    tables: returns the models of the server's own table, by their names
    hub: learns where pulled models lie
    apply: reads the table again and sends it to frontends; returns why this failed, else ""
    answer: sends the answer to a ticket to its frontend
    tell: sends the progress of a download to all frontends
    """

    file: Path
    tables: Callable[[], Mapping[str, str]]
    hub: HubModels
    apply: Callable[[], Awaitable[str]]
    answer: Answer
    tell: Callable[[Download], None]
    _pulls: dict[str, _Download] = field(default_factory=dict)
    _asked: dict[Asker, "asyncio.Task[None] | None"] = field(default_factory=dict)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)  # a file's header may take half a GB to read

    def ask(self, frontend: object, order: Ask) -> None:
        """Begins to carry out an order of a frontend."""
        asker = (frontend, order.ticket)
        if isinstance(order, Forget):
            self._forget(asker)
            return
        if sum(other is frontend for other, _ in self._asked) >= MOST_ASKED:
            self.answer(frontend, Done(order.ticket, "too many models are pulled and named at once", "busy"))
            return
        self._asked[asker] = None
        if isinstance(order, Pull):
            self._pull(asker, order)
        else:
            self._asked[asker] = asyncio.create_task(self._change(asker, order))

    def left(self, frontend: object) -> None:
        """Forgets the tickets of a frontend whose connection has ended."""
        for asker in [asker for asker in self._asked if asker[0] is frontend]:
            self._forget(asker)

    def close(self) -> None:
        for download in self._pulls.values():
            if download.task is not None:
                download.task.cancel()

    def _forget(self, asker: Asker) -> None:
        """Changes go on without the one who asked. A pull for which nobody waits ends."""
        self._asked.pop(asker, None)
        for download in self._pulls.values():
            if asker in download.waiting:
                download.waiting.discard(asker)
                if not download.waiting and download.task is not None:
                    download.task.cancel()

    def _done(self, asker: Asker, problem: str = "", code: str = "") -> None:
        if asker in self._asked:
            del self._asked[asker]
            self.answer(asker[0], Done(asker[1], problem, code))

    # Pulls.

    def _pull(self, asker: Asker, order: Pull) -> None:
        try:
            name = plain_name(order.name)
            if name in self._library().presets:
                raise LibraryError(f"{name} was made with /api/create: delete it first", "name_taken")
            running = self._pulls.get(name)
            if running is not None and running.waiting:
                running.waiting.add(asker)
                return
            if len(self._pulls) >= MOST_PULLS:
                raise LibraryError(f"{MOST_PULLS} models are fetched already; try again later", "busy")
        except (LibraryError, ConfigError) as error:
            self._done(asker, str(error), getattr(error, "code", "library_not_read"))
            return
        before = running.task if running is not None else None  # its end is awaited, as both write the same files
        download = self._pulls[name] = _Download({asker})
        download.task = asyncio.create_task(self._fetch(name, download, before))

    async def _fetch(self, name: str, download: _Download, before: "asyncio.Task[None] | None") -> None:
        problem = code = ""
        try:
            if before is not None:
                await asyncio.wait([before])
            if (own := self.tables().get(name)) is not None:
                if self.hub.is_away(own):
                    await self.hub.fetch(own, lambda line: self._progress(name, line))
            else:
                line = await run_pull([name], lambda line: self._progress(name, line))
                self.hub.found(line["model"], line["folder"])
                one = Pulled(line["model"], line["flags"])
                await self._write(lambda known: _with_pulled(known, name, one))
            self.tell(Download(name, "success"))
        except FetchFailed as error:
            problem, code = str(error), error.code
        except (LibraryError, ConfigError, OSError) as error:
            problem, code = str(error), getattr(error, "code", "library_not_written")
        except asyncio.CancelledError:
            self.tell(Download(name, "", error="nobody waits for it any more"))
            raise
        finally:
            if self._pulls.get(name) is download:
                del self._pulls[name]
        if problem:
            self.tell(Download(name, "", error=problem))
        for asker in sorted(download.waiting, key=lambda asker: asker[1]):
            self._done(asker, problem, code)

    def _progress(self, name: str, line: dict[str, Any]) -> None:
        if line["status"] != "success":  # success is reported when the model is in the table
            self.tell(progress_of(name, line))

    # Changes of names.

    async def _change(self, asker: Asker, order: Add | Create | Copy | Delete) -> None:
        problem = code = ""
        try:
            match order:
                case Add():
                    await self._add(plain_name(order.name), uploaded_file(order.digest))
                case Create():
                    name, preset = plain_name(order.name), order.preset
                    await self._write(lambda known: self._created(known, name, preset))
                case Copy():
                    source, name = plain_name(order.source), plain_name(order.destination)
                    await self._write(lambda known: self._created(known, name, Preset(source)))
                case Delete():
                    await self._delete(plain_name(order.name))
        except (LibraryError, ConfigError, OSError) as error:
            problem, code = str(error), getattr(error, "code", "library_not_written")
        self._done(asker, problem, code)

    def _library(self) -> Library:
        return read_library(self.file)

    async def _write(self, change: Callable[[Library], Library]) -> Library:
        async with self._changing:
            new = await asyncio.to_thread(change_library, self.file, change)
            if problem := await self.apply():
                raise LibraryError(f"the table of models was not read: {problem}", "table_not_read")
        return new

    def _created(self, known: Library, name: str, preset: Preset) -> Library:
        if name in self.tables() or name in known.pulled:
            raise LibraryError(f"{name} is a model of this server already: choose another name", "name_taken")
        base = plain_name(preset.base)
        made = msgspec.structs.replace(preset, base=base, made=time.time())
        if (older := known.presets.get(base)) is not None:
            made = made.over(older)
        elif base not in self.tables() and base not in known.pulled:
            raise LibraryError(f"the model {base} does not exist", "model_not_found")
        return Library(known.pulled, known.presets | {name: made})

    async def _add(self, name: str, file: Path) -> None:
        async with self._checking:
            await asyncio.to_thread(check_upload, file)
        model = str(file)

        def change(known: Library) -> Library:
            older = known.pulled.get(name)
            if name in self.tables() or name in known.presets or (older is not None and not _is_uploaded(older.model)):
                raise LibraryError(f"{name} is a model of this server already: choose another name", "name_taken")
            return Library(known.pulled | {name: Pulled(model)}, known.presets)

        await self._change_models(change)

    async def _delete(self, name: str) -> None:
        await self._change_models(lambda known: _without(known, name, self.tables()))

    async def _change_models(self, of: Callable[[Library], Library]) -> None:
        """Changes the library, and removes the files of the models that it then has no longer."""
        gone: list[Pulled] = []

        def change(known: Library) -> Library:
            gone.clear()
            new = of(known)
            left = {one.model for one in new.pulled.values()}
            gone.extend(one for one in known.pulled.values() if one.model not in left)
            return new

        await self._write(change)
        for one in gone:
            await _remove_files(one.model)


def progress_of(name: str, line: dict[str, Any]) -> Download:
    """Returns a line of `sluice pull --json` as the message for frontends."""
    numbers = line.get("total", 0), line.get("completed", 0)
    return Download(name, str(line["status"]), str(line.get("digest", "")), *numbers)


def _with_pulled(known: Library, name: str, one: Pulled) -> Library:
    if name in known.presets:
        raise LibraryError(f"{name} was made with /api/create meanwhile", "name_taken")
    return Library(known.pulled | {name: one}, known.presets)


def _without(known: Library, name: str, tables: Collection[str]) -> Library:
    """Returns the library without a name. What other names were made of a pulled model stays: the first that is only
    another name takes its place. Raises LibraryError."""
    presets = {other: preset for other, preset in known.presets.items() if other != name}
    if name in known.presets:
        return Library(known.pulled, presets)
    if name not in known.pulled:
        if name in tables:
            raise LibraryError(f"{name} was not pulled, but stands in the server's own table", "not_allowed")
        raise LibraryError(f"the model {name} does not exist", "model_not_found")
    pulled = {other: one for other, one in known.pulled.items() if other != name}
    based = {other: preset for other, preset in presets.items() if preset.base == name}
    if not based:
        return Library(pulled, presets)
    heir = next((other for other, preset in based.items() if preset.is_plain), None)
    if heir is None:
        raise LibraryError(f"{name} is what {', '.join(sorted(based))} was made from: delete that first", "in_use")
    moved = {
        other: msgspec.structs.replace(preset, base=heir) if preset.base == name else preset
        for other, preset in presets.items() if other != heir
    }  # fmt: skip
    return Library(pulled | {heir: known.pulled[name]}, moved)


def check_upload(file: Path) -> None:
    """Raises LibraryError if an uploaded file is gone, or is no model that this server serves."""
    try:
        config_of(Container.read([file]))
    except (OSError, GgufError) as error:
        reason = str(error).replace(str(file), "it")  # where it lies is no client's business
        raise LibraryError(f"the uploaded file cannot be served: {reason}", "file_not_served") from None


def _is_uploaded(model: str) -> bool:
    return Path(model).parent == library_file().parent / UPLOADS


async def _remove_files(model: str) -> None:
    """Removes a model's files with `sluice models --rm`. A loaded worker keeps what it has open.

    If other programs have removed them already, nothing is left to do.
    """
    if _is_uploaded(model):
        with contextlib.suppress(OSError):
            await asyncio.to_thread(Path(model).unlink)
        return
    command = [sys.executable, "-P", "-m", "deploy.cli.main", "models", "--rm", model]
    quiet = asyncio.subprocess.DEVNULL
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            *command, stdin=quiet, stdout=quiet, stderr=quiet, env=child_environment()
        )
        await process.wait()
