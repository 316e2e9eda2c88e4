"""The process of a rank other than 0, on the machine of rank 0 and, further below, on another host.

Rank 0 starts those on its machine: `python -m worker.follower PARENT SOCKET MEMORY`. PARENT is the process id of
rank 0. SOCKET and MEMORY are file descriptors.

The process loads its part of the model and computes the steps that rank 0 orders. It ends when rank 0 ends, or at its
first error. After an error, the whole worker is restarted, as after every crash.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig, Settings
from shared.config.worker import WorkerConfig
from shared.machine import available_bytes, memory
from worker.checkpoint.checkpoint import CheckpointError, weight_files
from worker.checkpoint.content_hash import ContentHashes
from worker.device import threads_of
from worker.distributed.checks import checksums, checksums_from_checkpoint
from worker.distributed.exchange import Exchange, exchange_of_hosts, exchange_of_machine
from worker.distributed.handshake import wait_for_end
from worker.distributed.leader import round_bytes, stay_on_node
from worker.distributed.lora import OwnAdapters
from worker.distributed.messages import (
    BOTH,
    CPU,
    HIDDEN,
    IN_C,
    LOGITS,
    AdapterFrame,
    Beginning,
    Free,
    Inbox,
    Join,
    Joining,
    KeepWeights,
    Loaded,
    Order,
    Sizes,
    adapters_of,
    inputs_of,
    receive,
    rows_of,
    send,
)
from worker.distributed.nccl import device_of_rank
from worker.distributed.pipeline import RankDecoder, own_loads, tell_progress
from worker.distributed.rendezvous import Hosts
from worker.engine.load_model import ModelFiles, content_of, explain_out_of_memory, find_model, through_cache
from worker.kv_cache.sizing import WeightsSize, check_host_of_several
from worker.kv_cache.tensors import KVCache
from worker.models.decoder import Decoder, Weights
from worker.models.load import load
from worker.models.sharding import CannotShare, Part
from worker.operations import FAST, Operations
from worker.ops import native as c_library
from worker.ops.exchange import RankLost, shared_bytes
from worker.ops.native import huge_pages

PR_SET_PDEATHSIG = 1


def main(orders: socket.socket, memory: int) -> None:
    begin = msgspec.msgpack.decode(receive(orders), type=Beginning)
    worker = begin.worker
    rows = {rank: socket.socket(fileno=file) for rank, file in begin.rows.items()}
    stay_on_node(begin.rank, worker.ranks)
    torch.set_num_threads(threads_of(worker))
    device = CPU if begin.exchange == IN_C else device_of_rank(worker, begin.rank)
    files = find_model(begin.model, worker, device, prefer_cache=True)
    part = files.parts(worker)[begin.rank]
    exchange = exchange_of_machine(part, begin.exchange, memory, begin.memory, rows, device)

    def ready(weights: Weights) -> Operations:
        join(exchange, orders)
        if device.type == "cuda":
            return measured_on_gpu(files, begin.model, worker, part, orders, weights)
        if part.stage.count > 1:
            send(orders, Free(available_bytes()))
        return FAST

    loads = own_loads(begin.loads, files.spec, part)
    compute(load_part(files, worker, orders, exchange, on_weights=ready, loads=loads), orders)


def join(exchange: Exchange, orders: socket.socket) -> None:
    """Connects this rank to others, if it is on a GPU, when all have loaded their weights. Raises RankLost."""
    if exchange.join is not None:
        send(orders, Joining())
        msgspec.msgpack.decode(receive(orders), type=Join)
        exchange.join()


def measured_on_gpu(
    files: ModelFiles, model: ModelConfig, worker: WorkerConfig, part: Part, orders: socket.socket, weights: Weights
) -> Operations:
    """Checks the GPU of this rank, and tells rank 0 how much memory is left. Returns the operations to compute with."""
    from worker.engine.ranks_on_gpu import measure
    from worker.kv_cache.sizing import GpuMemoryReader

    gpu = GpuMemoryReader(files.device, worker.gpu_memory_utilization)
    operations, free = measure(part, files, weights, model, worker, gpu, lambda: None)
    send(orders, free)
    return operations


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """What this rank has of the model, and of its adapters.

    like: a tensor [..., H] with the dtype of the residual stream. keep_weights: writes the weights to --weights-cache.
    """

    decoder: RankDecoder
    adapters: OwnAdapters
    like: Tensor
    keep_weights: Callable[[], None]


def compute(loaded: LoadedPart, orders: socket.socket) -> NoReturn:
    """Computes the orders of rank 0. Raises EOFError when rank 0 has ended, and RankLost when another rank has died."""
    part = loaded.decoder

    def hidden(given: Order) -> Tensor:
        used = loaded.adapters.rows(adapters_of(given)) if given.adapters else ()
        return part.with_adapters(used).hidden(inputs_of(given, loaded.like), checked=given.checked)

    by_name: dict[str, Callable[[Order], object]] = {
        HIDDEN: hidden,
        LOGITS: lambda given: part.logits(rows_of(given, loaded.like.device)),
        BOTH: lambda given: part.logits(hidden(given)),
    }
    decoder, inbox = msgspec.msgpack.Decoder(Order | AdapterFrame | KeepWeights), Inbox(orders)
    with torch.inference_mode():
        while True:
            match decoder.decode(inbox.take()):
                case Order() as given:
                    by_name[given.compute](given)
                case KeepWeights():  # steps go on meanwhile
                    threading.Thread(target=loaded.keep_weights, name="weights", daemon=True).start()
                case frame:
                    loaded.adapters.take(frame)


def load_part(
    files: ModelFiles,
    worker: WorkerConfig,
    orders: socket.socket,
    exchange: Exchange,
    content: Callable[[], str] = str,
    on_size: Callable[[WeightsSize], None] = lambda size: None,
    on_weights: Callable[[Weights], Operations] = lambda weights: FAST,
    loads: Tensor | None = None,
) -> LoadedPart:
    """Loads the part of this rank, and tells rank 0 when it is ready. Raises CheckpointError and CannotShare.

    content: returns the hash of the weight files, which rank 0 compares with its own hash; "" if both ranks read the
        same files
    on_size: as for load() of worker/models/load.py
    on_weights: called when the weights are loaded; returns the operations to compute with
    loads: as for Decoder.count_loads; None: this rank counts nothing
    """
    part, device, formats = exchange.part, files.device, files.formats
    read = partial(
        load, files.folder, files.spec, formats.dtype, device, invariant=worker.batch_invariant, memory=formats.memory,
        on_size=on_size, share=part.share, stage=part.stage,
    )  # fmt: skip
    cached = worker if device.type == "cpu" else replace(worker, weights_cache="")  # only the CPU has such a cache
    weights, keep = through_cache(read, cached, files.folder, formats, part)
    operations = on_weights(weights)
    loaded = _loaded(files, worker, weights, part)
    size = msgspec.msgpack.decode(receive(orders), type=Sizes).size
    spec, groups = part.spec(files.spec), part.stage.groups(size.groups)
    cache = KVCache(spec, size.pages, size.page_size, formats.kv_dtype, device, groups, size.state_slots, formats.dtype)
    if device.type == "cpu":
        for tensor in (*cache.k, *cache.v):
            huge_pages(tensor)
        cache.prefault_ahead(c_library.touch_pages)
    decoder = Decoder(spec, weights, size.max_seq_len, operations)
    if loads is not None:
        decoder.count_loads(loads)
    computing = exchange.decoder(decoder, cache)
    send(orders, msgspec.structs.replace(loaded, content=content()))
    if part.stage.index and not part.tp_rank:
        threading.Thread(
            target=tell_progress, args=(decoder.layers_started, orders), name="progress", daemon=True
        ).start()
    adapters = OwnAdapters(files.folder, files.spec, weights, part, worker.max_lora_rank)
    return LoadedPart(computing, adapters, weights.embed.like, keep)


def _loaded(files: ModelFiles, worker: WorkerConfig, weights: Weights, part: Part) -> Loaded:
    if not worker.rank_check_weights:
        return Loaded()
    following = part.next
    read = checksums_from_checkpoint(files.stored(worker), following.share, lambda: None, following.stage, files.device)
    return Loaded(checksums(weights, part.stage.first), read)


def _end_with_parent() -> None:
    """Makes the kernel kill this process when rank 0 ends for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches all processes, but rank 0 must drain first
        signal.signal(number, signal.SIG_IGN)


def start(words: Sequence[str]) -> None:
    """Runs the process. words: the arguments PARENT, SOCKET and MEMORY"""
    parent, source, shared = map(int, words)
    _end_with_parent()
    if os.getppid() == parent:  # otherwise, rank 0 has died already
        with contextlib.suppress(EOFError):
            main(socket.socket(fileno=source), shared)


# The process of a rank other than 0 on another host: `sluice worker --rank-group torchrun` or `lws`.
#
# The process waits for rank 0, loads its part of the model from its own --model, and computes the steps that rank 0
# orders. It has no sockets for frontends. When rank 0 or another rank has ended, it ends with exit code 1, so that
# torchrun or the LeaderWorkerSet starts it again. Then all ranks find each other again.

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
        with _errors_to_rank_0(joined.orders):
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
def _errors_to_rank_0(orders: socket.socket) -> Iterator[None]:
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


if __name__ == "__main__":
    start(sys.argv[1:])
