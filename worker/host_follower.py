"""The process of a rank other than 0 on another host: `sluice worker --rank-group torchrun` or `lws`.

The process waits for rank 0, loads its part of the model from its own --model, and computes the steps that rank 0
orders. It has no sockets for frontends. When rank 0 or another rank has ended, it ends with exit code 1, so that
torchrun or the LeaderWorkerSet starts it again. Then all ranks find each other again.
"""

import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType

import torch

from shared.config.declaration import ConfigError
from shared.config.settings import Settings
from shared.machine import available_bytes, memory
from worker.checkpoint.checkpoint import CheckpointError, weight_files
from worker.checkpoint.content_hash import ContentHashes
from worker.device import threads_of
from worker.distributed.exchange import Exchange, exchange_of_hosts
from worker.distributed.handshake import wait_for_end
from worker.distributed.leader import round_bytes, stay_on_node
from worker.distributed.messages import Free, Loaded, send
from worker.distributed.nccl import device_of_rank
from worker.distributed.rendezvous import Hosts
from worker.engine.load_model import content_of, explain_out_of_memory, find_model
from worker.follower import compute, join, load_part, measured_on_gpu
from worker.kv_cache.sizing import WeightsSize, check_host_of_several
from worker.models.decoder import Weights
from worker.models.sharding import CannotShare
from worker.operations import FAST, Operations
from worker.ops.exchange import RankLost, shared_bytes

log = logging.getLogger("sluice.ranks")

BEYOND_DRAIN_S = 5.0


def follow(settings: Settings, hosts: Hosts) -> None:
    """Computes for rank 0 until a rank ends. Returns normally only if this process got SIGTERM before.

    Raises Refused if the settings of this rank do not fit those of rank 0, ConfigError and CheckpointError if this rank
    cannot load the model, and RankLost if another rank has ended.
    """
    group, worker = hosts.group, settings.worker
    stay_on_node(group.place, group.here)
    torch.set_num_threads(threads_of(worker, group.here))
    device = device_of_rank(worker, group.place, group.here)
    files = find_model(settings.model, worker, device, prefer_cache=True)
    try:
        part = files.parts(worker)[group.rank]
    except CannotShare as error:
        raise ConfigError(error) from error
    hashes = ContentHashes(weight_files(files.folder), worker.weights_cache)
    joined = hosts.join(files.facts(worker))
    stop = _Stop.install(worker.drain_timeout)
    size = shared_bytes(round_bytes(files.spec, joined.worker.max_step_tokens))
    exchange = exchange_of_hosts(part, size, joined.rows, (group.leader, group.port), device)
    if device.type == "cuda":
        threading.Thread(target=_end_with, args=(joined.orders, exchange), name="rank 0", daemon=True).start()
    own_settings = replace(joined.worker, weights_cache=worker.weights_cache)  # a folder on this host
    log.info("rank %d of %d has found all others", group.rank, group.count)

    def check_size(size: WeightsSize) -> None:
        if device.type == "cpu":
            check_host_of_several(size, 0, group.machines, memory())

    def ready(weights: Weights) -> Operations:
        join(exchange, joined.orders)
        if device.type == "cuda":
            return measured_on_gpu(files, settings.model, joined.worker, part, joined.orders, weights)
        send(joined.orders, Free(available_bytes() // group.here))
        return FAST

    try:
        with _told(joined.orders):
            computing = load_part(
                files, own_settings, joined.orders, exchange, partial(content_of, hashes),
                check_size, ready,
            )  # fmt: skip
        log.info("rank %d is ready", group.rank)
        compute(computing, joined.orders)
    except (EOFError, OSError, RankLost) as error:
        if stop.requested:
            return
        raise RankLost(_why(error)) from error


def _end_with(orders: socket.socket, exchange: Exchange) -> None:
    """Ends the exchange when rank 0 has ended. A rank that waits for its GPU does not see the end of `orders`."""
    wait_for_end(orders)
    exchange.end()


def _why(error: Exception) -> str:
    match error:
        case EOFError():
            return "rank 0 has ended"
        case OSError():
            return f"the connection to rank 0 has broken: {error.strerror}"
    return str(error)


@contextlib.contextmanager
def _told(orders: socket.socket) -> Iterator[None]:
    """Sends the error to rank 0 if this rank cannot load, so that the operator also finds it in rank 0's log."""
    try:
        with explain_out_of_memory(None):
            yield
    except (ConfigError, CheckpointError, CannotShare) as error:
        with contextlib.suppress(OSError):
            send(orders, Loaded(problem=str(error)))
        raise ConfigError(error) if isinstance(error, CannotShare) else error from None


@dataclass(slots=True)
class _Stop:
    """Remembers SIGTERM. The process goes on for a while, because rank 0 gets the signal, too, and must drain first."""

    requested: bool = False

    @classmethod
    def install(cls, drain_s: float) -> "_Stop":
        stop = cls()

        def handle(number: int, frame: FrameType | None) -> None:
            stop.requested = True
            signal.setitimer(signal.ITIMER_REAL, drain_s + BEYOND_DRAIN_S)

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGALRM, lambda number, frame: sys.exit(0))
        return stop
