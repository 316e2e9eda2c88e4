"""One frontend process: opens the port, loads the tokenizer, serves, drains. The command line is in deploy/cli.

The port is opened before the tokenizer is loaded, so that `/health` and `/ready` respond at once.

SIGTERM and Ctrl-C start a drain: no more requests are admitted, and running ones may finish. A second signal, more than
a second after the first (shared/heartbeat.py), ends the process at once. This does not hold under the
launcher: a process manager signals both processes, so the frontend may get the first signal twice. The launcher kills
the frontend when it gets a second signal itself. SIGHUP means that another process has taken over the port: this
process accepts no more connections, and serves the open ones.
"""

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from frontend.app import create_app
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import PrometheusMetrics
from frontend.server.access import check_tls
from frontend.server.http_protocol import ConnectionLimits, LimitedHttpProtocol, enforce_timeouts
from frontend.text.tokenizer import Tokenizer
from frontend.workers.membership import Discovery
from frontend.workers.pool import WorkerPool
from shared.address import parse_all
from shared.config.settings import Settings
from shared.heartbeat import Heartbeat, Phase, StopRequests, ignore_further
from shared.machine import map_large_buffers
from shared.model_list import Entry, read_entries
from shared.wire import keys_for

GRACE_S = 5.0  # time after a drain in which connections may receive their last bytes
IDLE_CLOSE_S = 3.0  # time after SIGHUP until idle connections are closed
HOLD_S = 30.0  # how long `hold` waits for readiness before it accepts connections anyway
READY_POLL_S = 0.05
BEAT_S = 0.2
# Decoding a frame for thousands of streams creates far more live objects than Python's threshold of 700. With that
# threshold, garbage collections would run often and find nothing.
GC_THRESHOLDS = (50_000, 20, 20)
# How long a thread that reads a grammar or a large body may keep the event loop waiting for the GIL; Python's own 5 ms
# would delay every token of other streams.
SWITCH_S = 0.001


class Server(uvicorn.Server):
    """A uvicorn server that still responds (with 503) while it drains, and exits with success after a signal."""

    def __init__(
        self, config: uvicorn.Config, models: ModelTable, drain_timeout: float, heartbeat: Heartbeat, *, hold: bool
    ) -> None:
        """hold: whether to accept connections only when requests can be served"""
        super().__init__(config)
        self._heartbeat = heartbeat
        self._hold = hold
        self._accepting: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self.opened = asyncio.Event()
        self._models = models
        self._drain_timeout = drain_timeout
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._stop_requests = StopRequests()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([] if self._hold else sockets)
        self.opened.set()
        if self._hold:
            self._accepting = self._loop.create_task(self._accept(sockets or []))
        else:
            self._heartbeat.phase = Phase.SERVING

    async def _accept(self, sockets: list[socket.socket]) -> None:
        """Waits until requests can be served, for at most HOLD_S. Then listens, as uvicorn does at its start."""
        deadline = time.monotonic() + HOLD_S
        while not self._models.readiness.ready and time.monotonic() < deadline:
            await asyncio.sleep(READY_POLL_S)
        config = self.config
        connected = partial(config.http_protocol_class, config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]
        for listener in sockets:
            server = await self._loop.create_server(connected, sock=listener, ssl=config.ssl, backlog=config.backlog)
            self.servers.append(server)
        self._heartbeat.phase = Phase.SERVING

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Drains and exits. A second call, more than a second later, exits at once unless `sluice serve` started the
        process."""
        second = self._stop_requests.is_second()
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())
        elif second and self._heartbeat.file is None:
            self.should_exit = self.force_exit = True

    @property
    def stopping(self) -> bool:
        """Whether a signal has asked this process to stop."""
        return self._draining is not None

    def leave(self) -> None:
        """Accepts no more connections. Exits when the open ones are closed, or after the drain's time limit."""
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._leave())

    async def _leave(self) -> None:
        for server in self.servers:
            server.close()
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        left_at = time.monotonic()
        while self.server_state.connections and time.monotonic() < left_at + self._drain_timeout:
            await asyncio.sleep(BEAT_S)
            if time.monotonic() > left_at + IDLE_CLOSE_S:
                for connection in list(self.server_state.connections):
                    connection.shutdown()  # closes an idle connection at once, and a busy one after its response
        await self._models.drain(0.0)
        self.should_exit = True

    async def _drain(self) -> None:
        await self._models.drain(self._drain_timeout)
        self.should_exit = True


def serve(
    settings: Settings,
    sockets: list[socket.socket] | None = None,
    *,
    heartbeat: Heartbeat | None = None,
    hold: bool = False,
) -> None:
    """Runs one frontend until a signal ends it. `settings.model.model` is the folder of the checkpoint.

    heartbeat: tells the launcher that this process lives, and when it accepts connections
    hold: whether to accept connections only when requests can be served

    Raises:
        TokenizerError: the folder has no usable tokenizer.
        ConfigError: the file of API keys, a certificate or a key of the wire cannot be used.
    """
    map_large_buffers()
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings, sockets, heartbeat or Heartbeat(), hold=hold))


async def run(settings: Settings, sockets: list[socket.socket] | None, heartbeat: Heartbeat, *, hold: bool) -> None:
    """Does the same as `serve`, but in the running event loop."""
    config = settings.frontend
    check_tls(config)
    for address in (settings.wire.requests, *config.worker_addresses.split(",")):
        keys_for(address.strip(), settings.wire, worker=False)  # called only to raise its ConfigError
    entries = read_entries(Path(settings.models.models)) if settings.many else []
    names = [entry.name for entry in entries] or [settings.model.name]
    metrics = PrometheusMetrics(config.metrics_prefix, names, config.metrics_aliases, on_demand=bool(entries))
    limits = ConnectionLimits.of(config)
    tokenizer: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    models = _many(settings, entries, metrics) if entries else _model_table(settings, tokenizer, metrics)
    app = create_app(config, models, metrics)
    server = Server(
        _uvicorn_config(settings, app, partial(LimitedHttpProtocol, limits, metrics.refused)),
        models,
        settings.worker.drain_timeout,
        heartbeat,
        hold=hold,
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.leave)
    heartbeat_task = asyncio.create_task(_send_heartbeats(heartbeat))
    timeouts_task = asyncio.create_task(enforce_timeouts(server.server_state.connections, limits))
    loading = None if entries else asyncio.create_task(_load_tokenizer(settings, server, tokenizer))
    try:
        await server.serve(sockets)
        if server.stopping:
            ignore_further()
    finally:
        if loading is not None:
            loading.cancel()
        heartbeat_task.cancel()
        timeouts_task.cancel()
    if tokenizer.done() and not tokenizer.cancelled():
        tokenizer.result()  # raises the error if the tokenizer was not loaded


def _model_table(settings: Settings, tokenizer: asyncio.Future[Tokenizer], metrics: PrometheusMetrics) -> ModelTable:
    """Makes the model table of a server with one model: that model and its adapters. Raises ConfigError."""
    names, pool = settings.model.names, _worker_pool(settings, tokenizer)
    model = ServedModel.of(names, settings.frontend, pool, tokenizer, metrics.models[names[0]])
    if not (settings.model.lora_modules or settings.model.allow_runtime_lora):
        return ModelTable([model])
    from frontend.lora import AdapterRegistry

    return ModelTable([model], AdapterRegistry(settings.model, settings.wire.run_dir))


def _many(settings: Settings, entries: list[Entry], metrics: PrometheusMetrics) -> ModelTable:
    """Makes the table for many models, whose workers the launcher starts and stops."""
    from frontend.loaded_models import LoadedModels

    return LoadedModels(settings, entries, metrics.of_model)


def _worker_pool(settings: Settings, tokenizer: asyncio.Future[Tokenizer]) -> WorkerPool:
    """Creates the worker pool. If no workers are named, it has one worker, at the addresses of `settings.wire`."""
    config = settings.frontend
    file = Path(config.workers_file) if config.workers_file else None
    has_discovery = bool(config.worker_addresses or file)

    def tokenizer_hash() -> str:
        loaded = tokenizer.done() and not tokenizer.cancelled() and tokenizer.exception() is None
        return tokenizer.result().hash if loaded else ""

    return WorkerPool(
        settings.wire,
        Discovery(parse_all(config.worker_addresses), file) if has_discovery else None,
        stall_timeout=config.stall_timeout,
        recovery_timeout=config.recovery_timeout,
        model=settings.model.name,
        tokenizer_hash=tokenizer_hash,
        remote_prefill_tokens=config.remote_prefill_tokens,
        remote_prefill_timeout=config.remote_prefill_timeout,
    )


async def _send_heartbeats(heartbeat: Heartbeat) -> None:
    while True:
        heartbeat.alive()
        heartbeat.progress()
        await asyncio.sleep(BEAT_S)


async def _load_tokenizer(settings: Settings, server: Server, tokenizer: asyncio.Future[Tokenizer]) -> None:
    folder, template = Path(settings.model.model), settings.frontend.chat_template
    await server.opened.wait()
    try:
        tokenizer.set_result(await asyncio.to_thread(Tokenizer.load, folder, template, settings.model.task))
    except Exception as exc:
        tokenizer.set_exception(exc)
        server.should_exit = True
    gc.collect()
    gc.freeze()  # these objects live as long as the process, so no later collection needs to scan them
    gc.set_threshold(*GC_THRESHOLDS)


def _uvicorn_config(settings: Settings, app: Any, protocol: Any) -> uvicorn.Config:
    config = settings.frontend
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # hides warnings about malformed requests, which metrics count
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the same, about malformed forms
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # no code needs the client's address
        timeout_keep_alive=math.ceil(config.idle_timeout),
        timeout_graceful_shutdown=int(GRACE_S),
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
    )
