"""Ranks of a model in stages, each in a thread that computes the orders of rank 0 as a process does."""

import mmap
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shared.config.worker import WorkerConfig
from shared.lora import read_files
from tests.worker.models.harness import CPU, cache_for
from worker.checkpoint.checkpoint import read_config
from worker.distributed.exchange import Exchange
from worker.distributed.leader import _connected
from worker.distributed.lora import AdaptersOfRanks, OwnAdapters
from worker.distributed.messages import LOGITS, order, send
from worker.distributed.pipeline import RankDecoder, ReturnedRows, StagedModel
from worker.follower import LoadedPart, compute
from worker.lora.ops import AdapterRows
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import load
from worker.models.sharding import Part, parts_of
from worker.ops.exchange import RankLost, shared_bytes
from worker.quantization.methods import AS_STORED, InMemory
from worker.spec import ModelSpec

ROUND = 4096
POSITIONS = 512


def spec_of(folder: Path) -> ModelSpec:
    return spec_from_config(read_config(folder))


def parts_for(spec: ModelSpec, stages: int, tp_size: int = 1) -> tuple[Part, ...]:
    worker = WorkerConfig(pipeline_parallel_size=stages, tensor_parallel_size=tp_size)
    return parts_of(spec, worker, lambda: ([1] * len(spec.layers), 0))


@contextmanager
def exchanges(parts: tuple[Part, ...]) -> Iterator[list[Exchange]]:
    """Yields the exchanges of all ranks. At the end, ends them, and then closes their connections."""
    rows = _connected(parts)
    shared = [mmap.mmap(-1, shared_bytes(ROUND)) for _ in range(parts[0].stage.count)]
    found = [Exchange.of(part, shared[part.stage.index], rows[part.rank], by_tcp=False) for part in parts]
    try:
        yield found
    finally:
        for one in found:
            one.end()
        for link in {link for links in rows for link in links.values()}:
            link.close()


def decoder_of(
    folder: Path, exchange: Exchange, dtype: torch.dtype, memory: InMemory = AS_STORED
) -> tuple[Decoder, RankDecoder]:
    """Loads the part of a rank. Returns its decoder, and the one that computes with the other ranks."""
    spec, part = spec_of(folder), exchange.part
    weights = load(folder, spec, dtype, CPU, invariant=True, memory=memory, share=part.share, stage=part.stage)
    decoder = Decoder(part.spec(spec), weights, POSITIONS)
    return decoder, exchange.decoder(decoder, cache_for(decoder, tokens=POSITIONS))


def follow(loaded: LoadedPart, orders: socket.socket, exchange: Exchange) -> None:
    """Computes the orders of rank 0. The connections of a rank end with it, as those of a process do."""
    with orders, suppress(RankLost, EOFError, OSError):
        try:
            compute(loaded, orders)
        finally:
            exchange.end()


@contextmanager
def staged(
    folder: Path,
    parts: tuple[Part, ...],
    dtype: torch.dtype,
    memory: InMemory = AS_STORED,
    prepare: Callable[[list[RankDecoder]], None] = lambda ranks: None,
    adapters: Sequence[Path] = (),
) -> Iterator[StagedModel]:
    """The model as rank 0 sees it, while all other ranks compute in threads. prepare: gets the decoders of all ranks

    adapters: their folders; the other ranks get them with the numbers 1, 2, ...
    """
    with exchanges(parts) as found, ExitStack() as stack:
        (decoder, own), *others = [decoder_of(folder, one, dtype, memory) for one in found]
        prepare([own, *(computing for _, computing in others)])
        orders = dict[Part, socket.socket]()
        for exchange, (other, computing) in zip(found[1:], others, strict=True):
            ours, theirs = socket.socketpair()
            orders[exchange.part] = stack.enter_context(ours)
            loaded = loaded_part(folder, exchange.part, other, computing)
            threading.Thread(target=follow, args=(loaded, theirs, exchange), daemon=True).start()
        given = AdaptersOfRanks(parts[0], lambda frame: [send(link, frame) for link in orders.values()])
        for number, one in enumerate(adapters, 1):
            given.give(number, read_files(str(one)))
        ring = found[0].ring
        assert ring is not None
        stage, order_all = parts[0].stage, partial(_order_all, orders)
        returned = ReturnedRows(ring, list(orders.values()), decoder.layers_started, stage.count)
        yield StagedModel(spec_of(folder), decoder, own, order_all, returned, stage)


def loaded_part(folder: Path, part: Part, decoder: Decoder, computing: RankDecoder) -> LoadedPart:
    own = OwnAdapters(folder, spec_of(folder), decoder.weights, part, 64)
    return LoadedPart(computing, own, decoder.weights.embed.like, lambda: None)


def _order_all(
    orders: dict[Part, socket.socket],
    name: str,
    inputs: ForwardInputs | Tensor,
    own: Callable[[bool], Tensor],
    adapters: Sequence[AdapterRows] = (),
) -> Tensor:
    used = [(one.adapter.number, one.scale, one.of_all) for one in adapters]
    for part, link in orders.items():
        if name != LOGITS or not part.stage.index:
            send(link, order(name, inputs, checked=True, adapters=used))
    return own(True)
