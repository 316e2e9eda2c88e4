"""One worker process: bind, load, serve, drain. The command is `sluice worker`; see deploy/cli/process_commands.py.

The sockets are up before the weights are: every frontend shows the loading's progress from the first second.
"""

import gc
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import torch

from shared.config import ConfigError, Settings
from shared.heartbeat import Heartbeat, Phase
from shared.messages import Outcome, Status, WorkerState
from worker.engine.crash_journal import CrashJournal
from worker.engine.load import Engine, load_engine
from worker.engine.loop import Loop
from worker.engine.requests import RequestTable
from worker.observability.metrics import Metrics
from worker.observability.stats import Stats
from worker.schedule.scheduler import SchedulerStatus
from worker.transport.server import Identity, WireServer

log = logging.getLogger("sluice.worker")


def run(settings: Settings, epoch: int, heartbeat: Heartbeat, *, again: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `again`: in place of one that died, so with the same weights.

    Raises:
        ConfigError, CheckpointError: this model cannot be served with these settings.
        DeviceBroken: the device cannot compute any more; live requests were told nothing, so that they go on
            with the next worker.
    """
    torch.set_num_threads(settings.worker.threads or len(os.sched_getaffinity(0)))
    stop = _Stop.on_signals()
    state = _State(settings, epoch, heartbeat)
    identity = Identity(epoch, settings.model.name)
    link = WireServer(settings.wire, identity, settings.worker.lease_timeout, state.status, heartbeat)
    state.wire = link.totals
    link.start()
    heartbeat.phase = Phase.LOADING
    try:
        engine = load_engine(settings.model, settings.worker, state.loading, state.downloading, prefer_cache=again)
        engine.runner.check_device()
        stop.serving = True
        _serve(settings, engine, link, state, stop)
    except Exception as error:
        state.failed = str(error)
        raise
    finally:
        link.close()


def _serve(settings: Settings, engine: Engine, link: WireServer, state: "_State", stop: "_Stop") -> None:
    metrics = Metrics(settings.frontend.metrics_prefix)
    seeds = random.Random(settings.worker.seed) if settings.worker.seed >= 0 else random.SystemRandom()
    engine.compiler.wake = link.awake.set
    request_table = RequestTable(
        engine.scheduler,
        state.stats,
        metrics,
        vocab_size=engine.limits.vocab_size,
        seeds=seeds,
        crash_journal=CrashJournal(state.heartbeat),
        compiler=engine.compiler,
    )
    canary_s = settings.worker.canary_interval
    loop = Loop(engine.scheduler, engine.runner, request_table, link, state.stats, metrics, canary_s=canary_s)
    link.step_progress = lambda: engine.runner.layers_started
    state.engine, state.metrics = engine, metrics
    state.heartbeat.phase = Phase.SERVING
    if settings.worker.worker_metrics_port:
        _open_metrics(metrics, link, settings)
    link.identity = Identity(link.identity.epoch, settings.model.name, engine.tokenizer_hash, engine.limits)
    log.info("ready: %s", settings.model.name)
    gc.collect()
    gc.freeze()  # torch's modules and the model live for ever: no step pauses to look through them again
    loop.run(lambda: stop.asked)
    log.info("draining for at most %g s", settings.worker.drain_timeout)
    request_table.draining = state.draining = True
    deadline = time.monotonic() + settings.worker.drain_timeout
    loop.run(lambda: not engine.scheduler.has_work or time.monotonic() > deadline)
    engine.compiler.close()
    request_table.end_all(Outcome.SHUTDOWN, time.monotonic(), "the server shut down before this was done")
    request_table.publish(link, time.monotonic())


def _open_metrics(metrics: Metrics, link: WireServer, settings: Settings) -> None:
    host, port = settings.worker.worker_host, settings.worker.worker_metrics_port
    try:
        metrics.serve(link, host, port)
    except OSError as error:
        raise ConfigError(f"--worker-metrics-port {port}: cannot listen on {host}: {error.strerror}") from error


@dataclass(slots=True)
class _Stop:
    """Turned true by the first SIGTERM or SIGINT. Before there is somebody to serve, the process ends then."""

    asked: bool = False
    serving: bool = False

    @classmethod
    def on_signals(cls) -> "_Stop":
        stop = cls()

        def ask(number: int, frame: FrameType | None) -> None:
            stop.asked = True
            if not stop.serving:
                sys.exit(0)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask)
        return stop


@dataclass(slots=True)
class _State:
    """What Status and the scrape tell; read in other threads, where a count may be one step old."""

    settings: Settings
    epoch: int
    heartbeat: Heartbeat
    phase: WorkerState = WorkerState.LOADING
    progress: float = 0.0
    draining: bool = False
    engine: Engine | None = None
    stats: Stats = field(default_factory=Stats)
    failed: str = ""
    metrics: Metrics | None = None
    wire: Callable[[], dict[str, int]] = dict

    def loading(self, done: int, total: int) -> None:
        self._moved(WorkerState.LOADING, done, total)

    def downloading(self, done: int, total: int) -> None:
        self._moved(WorkerState.DOWNLOADING, done, total)

    def _moved(self, phase: WorkerState, done: int, total: int) -> None:
        self.heartbeat.progress()
        self.phase, self.progress = phase, done / max(1, total)

    def status(self) -> Status:
        model, engine = self.settings.model.name, self.engine
        if engine is None:
            device, dtype = self.settings.worker.device, self.settings.worker.dtype
            phase = WorkerState.FAILED if self.failed else self.phase
            return Status(self.epoch, os.getpid(), model, device, dtype, phase, self.progress, error=self.failed)
        now, scheduler, stats = time.monotonic(), engine.scheduler.status, self.stats
        self._count(scheduler)
        return Status(
            self.epoch,
            os.getpid(),
            model,
            engine.device,
            engine.dtype,
            self._state(),
            max_seq_len=engine.limits.max_seq_len,
            running=scheduler.running,
            waiting=scheduler.waiting,
            waiting_tokens=scheduler.waiting_tokens,
            pages=engine.pool.counts(),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens_s=stats.prompt.per_second(now),
            generation_tokens_s=stats.generation.per_second(now),
            ttft=stats.ttft.quantiles(),
            itl=stats.itl.quantiles(),
            e2e=stats.e2e.quantiles(),
            error=self.failed,
            kernels=engine.kernels,
            pace=scheduler.prefill_budget,
            draft_tokens=scheduler.draft_tokens,
            accepted_tokens=scheduler.accepted_tokens,
        )

    def _state(self) -> WorkerState:
        if self.failed:
            return WorkerState.FAILED
        return WorkerState.DRAINING if self.draining else WorkerState.READY

    def _count(self, scheduler: SchedulerStatus) -> None:
        """Brings counters up to date that others keep: Status is made several times a second, and for each scrape."""
        if self.metrics is not None:
            self.metrics.update_totals(
                {
                    "prefix_cache_queries": scheduler.prefix_queries,
                    "prefix_cache_hits": scheduler.prefix_hits,
                    "num_preemptions": scheduler.preemptions,
                    "spec_decode_num_draft_tokens": scheduler.draft_tokens,
                    "spec_decode_num_accepted_tokens": scheduler.accepted_tokens,
                    **self.wire(),
                }
            )
