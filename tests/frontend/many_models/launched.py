"""An app with many models whose launcher is played by the test, over workers without sockets."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from starlette.applications import Starlette

from frontend import loaded_models
from frontend.app import create_app
from frontend.loaded_models import LoadedModels
from frontend.observability.metrics import PrometheusMetrics
from shared.config.frontend import FrontendConfig
from shared.config.settings import Settings, with_values
from shared.launcher_messages import (
    SOCKET,
    Done,
    Download,
    FromFrontend,
    ModelState,
    Reload,
    Reloaded,
    Seen,
    Table,
    frame,
    read_from_frontend,
)
from shared.model_list import Entry, encode_entries
from tests.fakes import TEMPLATE, FakePool, sending
from tests.frontend.serving import until
from tests.frontend.text.tokenizers import byte_level, save
from tests.patience import PATIENCE_S

T = TypeVar("T")
HELLO = byte_level().encode("hello", add_special_tokens=False).ids


class Launcher:
    """A fake launcher that sends the test's messages to frontends, and records the messages of frontends."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.states = {name: ModelState(name, "unloaded") for name in names}
        self.heard: list[FromFrontend] = []
        self.checkpoint = str(save(byte_level(), folder / "checkpoint", tokenizer_config={"chat_template": TEMPLATE}))
        self.table = folder / "models.json"
        self.asleep = False
        self.problem = ""  # the answer to a Reload: the reason why the table cannot be read, or empty
        self._folder, self._version, self._reading = folder, 0, 1
        self.write([Entry("x", name=name) for name in names])
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._folder / SOCKET)

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await until(lambda: not self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._say(writer)
        try:
            while True:
                self.heard.append(message := await read_from_frontend(reader))
                if isinstance(message, Reload):
                    writer.write(frame(Reloaded(self.problem)))
        except (EOFError, OSError):
            writer.close()
            self._writers.discard(writer)

    def _say(self, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Table(self._version, tuple(self.states.values()), self._reading, self.asleep)))

    def write(self, entries: Iterable[Entry]) -> None:
        """Writes the table that frontends read."""
        self.table.write_bytes(encode_entries(entries))

    def replace(self, *entries: Entry) -> None:
        """Announces a new table. A loaded model that is not in it stays in the launcher's list until it is unloaded."""
        self.write(entries)
        known = {one.name: self.states.get(one.name, ModelState(one.name, "unloaded")) for one in entries}
        self.states = known | {name: state for name, state in self.states.items() if state.state == "loaded"}
        self._reading += 1
        self._version += 1
        for writer in self._writers:
            self._say(writer)

    def tell(self, name: str, state: Any, **more: Any) -> None:
        self._version += 1
        self.states[name] = ModelState(name, state, folder=self.checkpoint, **more)
        for writer in self._writers:
            self._say(writer)

    def send(self, *messages: Download | Done) -> None:
        for writer in self._writers:
            for message in messages:
                writer.write(frame(message))

    async def asked(self, kind: type[T]) -> T:
        """Waits for a message of this kind, and returns the last."""
        await until(lambda: any(isinstance(one, kind) for one in self.heard))
        return next(one for one in reversed(self.heard) if isinstance(one, kind))

    @property
    def seen(self) -> Seen:
        return next((one for one in reversed(self.heard) if isinstance(one, Seen)), Seen(0))

    async def until_wanted(self, *names: str) -> None:
        await until(lambda: self.seen.wanted == names)


@asynccontextmanager
async def launched(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *names: str,
    load_wait: float = 2 * PATIENCE_S,
    allow_pull: bool = False,
    **config: Any,
) -> AsyncIterator[tuple[Starlette, LoadedModels, Launcher]]:
    """Yields the app, its table, and its launcher. The app's lifespan has not begun."""
    monkeypatch.setattr(loaded_models, "WorkerPool", lambda *_, **more: FakePool(sending(HELLO)))
    settings = with_values(
        Settings(),
        {
            "run_dir": str(folder),
            "load_wait": load_wait,
            "models": str(folder / "models.json"),
            "allow_pull": allow_pull,
        },
    )
    shown = FrontendConfig(**{"access_log": "off", "allowed_hosts": "*", **config})
    metrics = PrometheusMetrics(names=list(names), on_demand=True)
    table = LoadedModels(settings, [Entry("x", name=name) for name in names], metrics.of_model)
    launcher = Launcher(folder, names)
    await launcher.open()
    try:
        yield create_app(shown, table, metrics), table, launcher
    finally:
        await launcher.close()
