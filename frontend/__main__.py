"""One frontend process: opens the port, loads the tokenizer, serves, drains. The command line is deploy's.

The port is open before the tokenizer is read, so that `/health` and `/ready` answer at once. On SIGTERM or
Ctrl-C nothing more is admitted while what runs may finish; a second signal does not wait.
"""

import asyncio
import gc
import logging
import socket
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from frontend.app import create_app
from frontend.link import Link
from frontend.service import Service
from frontend.tokenizer import Tokenizer
from shared.config import Settings

GRACE_S = 5.0  # for connections to take the last bytes after draining


class Server(uvicorn.Server):
    """uvicorn's, but it goes on answering (503) while it drains, and a signal is not a reason to fail."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout: float) -> None:
        super().__init__(config)
        self.opened = asyncio.Event()
        self._service = service
        self._drain_timeout = drain_timeout
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.opened.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """The first time: drain, then exit. The second time: exit."""
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._service.drain(self._drain_timeout)
        self.should_exit = True


def serve(settings: Settings, sockets: list[socket.socket] | None = None) -> None:
    """Runs one frontend until a signal ends it. `settings.model.model` is the checkpoint's folder.

    Raises:
        TokenizerError: the folder has no usable tokenizer.
        ConfigError: the file of API keys cannot be used.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings, sockets))


async def run(settings: Settings, sockets: list[socket.socket] | None = None) -> None:
    """As `serve`, in the running event loop."""
    config = settings.frontend
    link = Link(settings.wire, stall_timeout=config.stall_timeout, recovery_timeout=config.recovery_timeout)
    tokenizer: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    app = create_app(config, settings.model, link, tokenizer)
    server = Server(_uvicorn(settings, app), app.state.service, settings.worker.drain_timeout)
    loading = asyncio.create_task(_load(Path(settings.model.model), server, tokenizer))
    try:
        await server.serve(sockets)
    finally:
        loading.cancel()
    if tokenizer.done() and not tokenizer.cancelled():
        tokenizer.result()  # raises what kept it from loading


async def _load(folder: Path, server: Server, tokenizer: asyncio.Future[Tokenizer]) -> None:
    await server.opened.wait()
    try:
        tokenizer.set_result(await asyncio.to_thread(Tokenizer.load, folder))
    except Exception as exc:
        tokenizer.set_exception(exc)
        server.should_exit = True
    gc.collect()
    gc.freeze()  # what lives now lives for ever: no pause to look through it again


def _uvicorn(settings: Settings, app: Any) -> uvicorn.Config:
    config = settings.frontend
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its chat about starting and stopping helps nobody
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(GRACE_S),
    )
