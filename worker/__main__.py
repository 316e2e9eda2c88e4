"""One worker process: bind, load, serve, drain. The command is `sluice worker`; see deploy/cli/processes.py.

The sockets are bound before the weights are loaded, so that frontends can show the progress from the beginning.
"""

import gc
import logging
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import torch

from shared.config.declaration import ConfigError
from shared.config.settings import Settings
from shared.heartbeat import Heartbeat, Phase
from shared.messages import Outcome, Submit
from worker.device import threads_of
from worker.engine.build import Engine, load_engine
from worker.engine.crash_journal import CrashJournal
from worker.engine.loop import Loop
from worker.engine.metrics import DraftCollector, Metrics
from worker.engine.prefix_report import PrefixReport
from worker.engine.requests import RequestTable
from worker.engine.status import StatusReporter
from worker.engine.transport import Identity, WireServer
from worker.engine.validation import no_images
from worker.scheduler.sequence import Plan, Sequence

if TYPE_CHECKING:  # features, which are imported at run time only when needed
    from worker.distributed.leader import RankCounter
    from worker.distributed.rendezvous import Hosts
    from worker.engine.kv_events import KvEventPublisher
    from worker.kv_cache.store import KvStore
    from worker.lora.store import AdapterStore

log = logging.getLogger("sluice.worker")
FEW_TOKENS = 8192  # a warning says so if --role is given and --kv-store has room for fewer tokens


def run(
    settings: Settings, epoch: int, heartbeat: Heartbeat, *, again: bool = False, hosts: "Hosts | None" = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains.

    hosts: the rendezvous of the processes of --rank-group; None without the flag
    again: whether this worker replaces a worker that died. It then uses the checkpoint in the cache, which the dead
        worker served, even if the hub has a newer checkpoint.

    Raises:
        ConfigError, CheckpointError: this model cannot be served with these settings
        DeviceBroken: the device cannot compute any more. The worker sends no End for live requests, so that they
            continue in the next worker.
    """
    torch.set_num_threads(threads_of(settings.worker, 0 if hosts is None else hosts.group.here))
    if hosts is not None:
        from worker.distributed.leader import stay_on_node

        stay_on_node(hosts.group.place, hosts.group.here)
    stop = StopSignal.install()
    reporter = StatusReporter(settings, epoch, heartbeat)
    identity = Identity(epoch, settings.model.name)
    server = WireServer(settings.wire, identity, settings.worker.lease_timeout, reporter.status, heartbeat)
    reporter.wire_totals = server.totals
    server.start()
    heartbeat.phase = Phase.LOADING
    ranks = _rank_counter(settings)
    try:
        engine = load_engine(
            settings.model, settings.worker, reporter.on_load, reporter.on_download, prefer_cache=again,
            hosts=hosts,
        )  # fmt: skip
        engine.runner.check_device()
        stop.serving = True
        _serve(settings, engine, server, reporter, stop, ranks)
    except Exception as error:
        reporter.failed = str(error)
        if ranks is not None:
            ranks.count(error)
        raise
    finally:
        server.close()


def _serve(
    settings: Settings, engine: Engine, server: WireServer, reporter: StatusReporter, stop: "StopSignal",
    ranks: "RankCounter | None",
) -> None:  # fmt: skip
    metrics = Metrics(settings.frontend.metrics_prefix, settings.model.name, engine.size.page_size)
    metrics.expert_loads = engine.expert_loads
    if ranks is not None:
        metrics.registry.register(ranks.counter)
    seeds = random.Random(settings.worker.seed) if settings.worker.seed >= 0 else random.SystemRandom()
    engine.compiler.wake = server.awake.set
    request_table = RequestTable(
        engine.scheduler,
        reporter.stats,
        metrics,
        vocab_size=engine.limits.vocab_size,
        seeds=seeds,
        crash_journal=CrashJournal(reporter.heartbeat),
        compiler=engine.compiler,
        adapters=_adapters(settings, engine, server, metrics),
        give_images=_image_admission(settings, engine, metrics),
        task=engine.task,
    )
    canary_s = settings.worker.canary_interval
    loop = Loop(engine.scheduler, engine.runner, request_table, server, reporter.stats, metrics, canary_s=canary_s)
    if engine.runner.vision is not None:
        loop.between_steps = _between_steps(engine, request_table, loop, server)
    server.step_progress = lambda: engine.runner.layers_started
    reporter.engine, reporter.metrics = engine, metrics
    reporter.heartbeat.phase = Phase.SERVING
    if engine.scheduler.speculation is not None:
        metrics.collectors.append(DraftCollector(settings.frontend.metrics_prefix, engine.scheduler.speculation))
    store = reporter.kv_store = _kv_store(settings, engine, server, metrics, request_table)
    if settings.worker.worker_metrics_port:
        _serve_metrics(metrics, server, settings)
    server.identity = Identity(
        server.identity.epoch, settings.model.name, engine.tokenizer_hash, engine.limits, engine.fingerprint,
        "" if store is None else store.pages.space.hex(), 0 if store is None else store.most_tokens,
    )  # fmt: skip
    state = engine.scheduler.state
    if state.paging.prefix is not None:
        server.prefixes = PrefixReport.of(state.paging, state.live).take
    events = _kv_events(settings, engine)
    log.info("ready: %s", settings.model.name)
    gc.collect()
    gc.freeze()  # torch's modules and the model live until the process exits, so the collector need not scan them
    loop.run(lambda: stop.requested)
    log.info("draining for at most %g s", settings.worker.drain_timeout)
    request_table.draining = reporter.draining = True
    deadline = time.monotonic() + settings.worker.drain_timeout
    loop.run(lambda: not engine.scheduler.has_work or time.monotonic() > deadline)
    engine.compiler.close()
    if store is not None:
        store.close()
    if events is not None:
        events.close()
    request_table.end_all(Outcome.SHUTDOWN, time.monotonic(), "the server shut down before this was done")
    request_table.publish(server, time.monotonic())


def _rank_counter(settings: Settings) -> "RankCounter | None":
    """Returns a counter of the checks in which a rank had wrong numbers; None if there is only one rank."""
    if settings.worker.ranks == 1:
        return None
    from worker.distributed.leader import RankCounter

    return RankCounter(settings)


def _adapters(settings: Settings, engine: Engine, server: WireServer, metrics: Metrics) -> "AdapterStore | None":
    """Returns a store of LoRA adapters; None if the settings allow no adapters."""
    model = settings.model
    if not (model.lora_modules or model.allow_runtime_lora) or engine.weights is None:
        return None
    from worker.lora.store import AdapterCollector, AdapterStore

    store = AdapterStore(
        engine.folder, engine.spec, engine.weights, model, most=settings.worker.max_cpu_loras,
        max_rank=settings.worker.max_lora_rank, ranks=engine.adapters_of_ranks,
    )  # fmt: skip
    store.wake = server.awake.set
    metrics.collectors.append(AdapterCollector(settings.frontend.metrics_prefix, store, engine.scheduler))
    return store


def _image_admission(settings: Settings, engine: Engine, metrics: Metrics) -> Callable[[Sequence, Submit], None]:
    """Returns a function that checks the images of a request, and raises Refused if they cannot be served."""
    if engine.tower is None:
        return no_images
    from worker.vision.vision import ImageAdmission, VisionCollector

    if engine.runner.vision is not None:
        metrics.collectors.append(VisionCollector(settings.frontend.metrics_prefix, engine.runner.vision))
    return ImageAdmission(engine.tower, engine.scheduler.sequences, engine.runner.vision)


def _between_steps(
    engine: Engine, request_table: RequestTable, loop: Loop, server: WireServer
) -> Callable[[Plan], bool]:
    """Returns a function that encodes images between steps."""
    from worker.vision.vision import BetweenSteps, token_cost

    assert engine.runner.vision is not None
    return BetweenSteps(
        engine.runner.vision, engine.scheduler, token_cost(engine.spec), request_table.crash_journal.record_step,
        partial(request_table.publish, server, 0.0), engine.runner.check_device, loop.fail,
    )  # fmt: skip


def _kv_events(settings: Settings, engine: Engine) -> "KvEventPublisher | None":
    """Returns a publisher of the prefix cache's pages; None if the settings name no endpoint."""
    if not settings.worker.kv_events_endpoint:
        return None
    from worker.engine.kv_events import start

    return start(settings, engine.scheduler.state.paging)


def _kv_store(
    settings: Settings, engine: Engine, server: WireServer, metrics: Metrics, request_table: RequestTable
) -> "KvStore | None":
    """Opens the K/V store; returns None if the settings name no folder."""
    if not settings.worker.kv_store:
        return None
    from worker.engine.kv_store import HandOver, StoreCollector, open_store

    store = open_store(settings.worker, engine, server.awake.set)
    fetching = engine.scheduler.state.paging.fetching
    if store is not None and fetching is not None:
        metrics.collectors.append(StoreCollector(settings.frontend.metrics_prefix, store, fetching))
        request_table.hand_over = HandOver(store)
        if settings.worker.role != "both" and store.most_tokens < FEW_TOKENS:
            log.warning("--kv-store has room for %d tokens: no longer prompt is handed over", store.most_tokens)
    return store


def _serve_metrics(metrics: Metrics, server: WireServer, settings: Settings) -> None:
    host, port = settings.worker.worker_host, settings.worker.worker_metrics_port
    try:
        metrics.serve(server, host, port)
    except OSError as error:
        raise ConfigError(f"--worker-metrics-port {port}: cannot listen on {host}: {error.strerror}") from error


@dataclass(slots=True)
class StopSignal:
    """Sets `requested` on SIGTERM or SIGINT. While `serving` is False, a signal ends the process at once instead."""

    requested: bool = False
    serving: bool = False

    @classmethod
    def install(cls) -> "StopSignal":
        stop = cls()

        def handle(number: int, frame: FrameType | None) -> None:
            stop.requested = True
            if not stop.serving:
                sys.exit(0)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)
        return stop
