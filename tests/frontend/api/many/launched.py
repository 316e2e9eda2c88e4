"""An app with many models under a launcher that a test plays, over workers without sockets."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from frontend.api.app import create_app
from frontend.api.many import residents
from frontend.api.many.residents import Residents
from frontend.observability.metrics import PrometheusMetrics
from shared.config import FrontendConfig, Settings, with_values
from shared.models.entries import Entry
from shared.models.messages import SOCKET, FromFrontend, ModelState, Seen, Table, frame, read_from_frontend
from tests.fakes import TEMPLATE, FakePool, sending
from tests.frontend.serving import until
from tests.frontend.text.tokenizers import byte_level, save
from tests.patience import PATIENCE_S

HELLO = byte_level().encode("hello", add_special_tokens=False).ids


class Launcher:
    """Says what the test tells it to, and keeps what the frontend said."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.states = {name: ModelState(name, "unloaded") for name in names}
        self.heard: list[FromFrontend] = []
        self.checkpoint = str(save(byte_level(), folder / "checkpoint", tokenizer_config={"chat_template": TEMPLATE}))
        self._folder, self._version = folder, 0
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
                self.heard.append(await read_from_frontend(reader))
        except (EOFError, OSError):
            writer.close()
            self._writers.discard(writer)

    def _say(self, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Table(self._version, tuple(self.states.values()))))

    def tell(self, name: str, state: Any, **more: Any) -> None:
        self._version += 1
        self.states[name] = ModelState(name, state, folder=self.checkpoint, **more)
        for writer in self._writers:
            self._say(writer)

    @property
    def seen(self) -> Seen:
        return next((one for one in reversed(self.heard) if isinstance(one, Seen)), Seen(0))

    async def until_wanted(self, *names: str) -> None:
        await until(lambda: self.seen.wanted == names)


@asynccontextmanager
async def launched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str, load_wait: float = 2 * PATIENCE_S, **config: Any
) -> AsyncIterator[tuple[Starlette, Residents, Launcher]]:
    """Yields the app, whose lifespan has not begun, its table, and its launcher."""
    monkeypatch.setattr(residents, "WorkerPool", lambda *_, **more: FakePool(sending(HELLO)))
    settings = with_values(Settings(), {"run_dir": str(folder), "load_wait": load_wait})
    shown = FrontendConfig(**{"access_log": "off", "allowed_hosts": "*", **config})
    metrics = PrometheusMetrics(names=list(names))
    table = Residents(settings, [Entry("x", name=name) for name in names], lambda name: metrics.models[name])
    launcher = Launcher(folder, names)
    await launcher.open()
    try:
        yield create_app(shown, table, metrics), table, launcher
    finally:
        await launcher.close()
