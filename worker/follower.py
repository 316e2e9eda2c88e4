"""The process of a rank other than 0: `python -m worker.follower PARENT SOCKET MEMORY`.

Rank 0 starts it. PARENT is the process id of rank 0. SOCKET and MEMORY are file descriptors.

The process loads its part of the model and computes the steps that rank 0 orders. It ends when rank 0 ends, or at its
first error. After an error, the whole worker is restarted, as after every crash.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.machine import available_bytes
from worker.device import threads_of
from worker.distributed.checks import checksums, checksums_from_checkpoint
from worker.distributed.exchange import Exchange, exchange_of_machine
from worker.distributed.leader import stay_on_node
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
from worker.engine.load_model import ModelFiles, find_model, through_cache
from worker.kv_cache.sizing import WeightsSize
from worker.kv_cache.tensors import KVCache
from worker.models.decoder import Decoder, Weights
from worker.models.load import load
from worker.models.sharding import Part
from worker.operations import FAST, Operations
from worker.ops import native as c_library
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


if __name__ == "__main__":
    start(sys.argv[1:])
