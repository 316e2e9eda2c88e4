"""Rank 0's side: it starts the other ranks, or waits for them on other hosts, and sends them every step to compute."""

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from prometheus_client import Counter
from torch import Tensor

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig, Settings
from shared.config.worker import WorkerConfig
from shared.hf_hub import Progress
from shared.machine import available_bytes
from worker.distributed.checks import RankDiffers, Stored, check_slices, checksums, checksums_from_checkpoint
from worker.distributed.exchange import Exchange, exchange_of_hosts, exchange_of_machine
from worker.distributed.handshake import wait_for_end
from worker.distributed.lora import AdaptersOfRanks, adapters_in
from worker.distributed.messages import (
    BOTH,
    HIDDEN,
    LOGITS,
    ON_GPUS,
    Beginning,
    Free,
    Join,
    Joining,
    KeepWeights,
    Loaded,
    Sizes,
    order,
    receive,
    send,
)
from worker.distributed.nccl import exchange_on
from worker.distributed.pipeline import RankDecoder, ReturnedRows, StagedModel, make_loads, map_loads, own_loads
from worker.distributed.rendezvous import Gathered
from worker.kv_cache.sizing import PoolSize
from worker.kv_cache.tensors import KVCache
from worker.lora.ops import AdapterRows
from worker.models.decoder import Decoder, Weights
from worker.models.forward_inputs import ForwardInputs
from worker.models.sharding import CannotShare, Part, largest_inner
from worker.operations import Operations
from worker.ops.exchange import RankLost, shared_bytes
from worker.spec import ModelSpec

log = logging.getLogger("sluice.ranks")
Answer = Joining | Free | Loaded
MOST_BYTES = 4  # the maximum bytes of a number that is exchanged
POLL_S = 0.2
FOLLOWER: tuple[str, ...] = ("-m", "worker.follower")  # arguments of Python that start another rank


@dataclass(frozen=True, slots=True)
class Follower:
    """Another rank, seen from rank 0. wait_for_end: waits until the rank has ended, and returns how it ended."""

    part: Part
    pid: int
    orders: socket.socket
    wait_for_end: Callable[[], str]

    @property
    def rank(self) -> int:
        return self.part.rank


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """How to find the other ranks if they are on other hosts (rendezvous.py).

    gather: waits for the other ranks. content: returns the hash of this rank's weight files, which must be the same
        for all ranks. here: how many ranks share the memory of this machine. address: host and port of rank 0.
    """

    gather: Callable[[], Gathered]
    content: Callable[[Callable[[], None]], str]
    here: int
    address: tuple[str, int]


class Leader:
    """All ranks of a worker, seen from rank 0."""

    def __init__(
        self,
        stored: Stored,
        parts: Sequence[Part],
        device: torch.device,
        model: ModelConfig,
        worker: WorkerConfig,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Starts or finds the other ranks, which begin to load. Raises ConfigError if the model cannot be divided.

        parts: the parts of all ranks
        elsewhere: None if this process starts all other ranks
        """
        self.part, self._stored, self._worker, self._elsewhere = parts[0], stored, worker, elsewhere
        self.keep: Callable[[Progress], None] = lambda on_progress: None  # writes the weights to --weights-cache
        self._steps = 0
        self._sending = threading.Lock()  # held while a frame is sent to the ranks: frames must not mix
        self._differs: RankDiffers | None = None
        self._own: Loaded | None = None
        size = shared_bytes(round_bytes(stored.spec, worker.max_step_tokens))
        counted = elsewhere is None and worker.expert_metrics and self.part.stage.count > 1
        self._loads = make_loads(stored.spec) if counted else -1
        if elsewhere is None:
            self._exchange, self._followers = _start_all(parts, model, worker, size, self._loads, device)
            stay_on_node(0, len(parts))
        else:
            gathered = elsewhere.gather()
            self._exchange = exchange_of_hosts(self.part, size, gathered.rows, elsewhere.address, device)
            self._followers = [
                Follower(parts[one.rank], one.pid, one.orders, partial(wait_for_end, one.orders))
                for one in gathered.members
            ]
        for follower in self._followers:
            threading.Thread(target=self._watch, args=(follower,), name="rank", daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of all ranks, in order."""
        return os.getpid(), *(follower.pid for follower in self._followers)

    @property
    def adapters(self) -> AdaptersOfRanks:
        """The way by which the other ranks get LoRA adapters."""
        return AdaptersOfRanks(self.part, self.tell_all)

    def count_loads(self, decoder: Decoder) -> Tensor:
        """Counts how many rows choose each expert: returns [layers, E] int64 for all layers. decoder: of this rank"""
        own = decoder.count_loads(own_loads(self._loads, self._stored.spec, self.part))
        return own if self._loads < 0 else map_loads(self._loads, self._stored.spec)

    def join(self, on_progress: Callable[[], None]) -> None:
        """Connects the ranks, if they are on GPUs. Raises ConfigError and RankLost as free() does."""
        if self._exchange.join is None:
            return
        for follower in self._followers:
            answer = self._answer(follower, on_progress)
            assert isinstance(answer, Joining)
        self._tell(Join(), self._followers)
        self._exchange.join()

    def agree(self, own: Free, on_progress: Callable[[], None]) -> Free:
        """Returns what holds for all ranks on GPUs; nbytes: of the K/V and states of the whole model on all of them.

        Waits until they have measured their GPUs. Raises ConfigError, also if their kernels differ, and RankLost.
        """
        found = {self.part: own} | self._free_of_others(on_progress)
        if other := next((part.rank for part, free in found.items() if free.kernels != own.kernels), 0):
            raise ConfigError(
                f"rank {other} computes with other kernels than rank 0, because a check of its GPU ended otherwise "
                "(see the log): use --kernels torch"
            )
        nbytes = min(part.whole_kv(free.nbytes, self._stored.spec) for part, free in found.items())
        return Free(nbytes, own.kernels, all(free.invariant for free in found.values()))

    def free(self, on_progress: Callable[[], None]) -> int | None:
        """Waits until all ranks have loaded their weights. Returns the bytes that the pool of the whole model may have.

        On each host, the ranks have room for their parts of it. Returns None if all ranks are on this machine. Raises
        ConfigError if another rank cannot load its weights, and RankLost if another rank has ended.
        """
        self.join(on_progress)
        if self._elsewhere is None and self.part.stage.count == 1:
            return None
        others = self._free_of_others(on_progress)
        if self._elsewhere is None:
            return None
        free = {self.part: Free(available_bytes() // self._elsewhere.here)} | others
        return min(part.whole_kv(one.nbytes, self._stored.spec) for part, one in free.items())

    def _free_of_others(self, on_progress: Callable[[], None]) -> dict[Part, Free]:
        found = dict[Part, Free]()
        for follower in self._followers:
            answer = self._answer(follower, on_progress)
            assert isinstance(answer, Free)
            found[follower.part] = answer
        return found

    def model(
        self, decoder: Decoder, cache: KVCache, size: PoolSize, on_progress: Callable[[], None]
    ) -> "SharedModel | StagedModel":
        """Waits until all ranks have loaded their parts. Returns the model for the runner.

        decoder, cache: those of this rank. Raises ConfigError if another rank cannot load its part, and RankLost if a
        rank on another host has ended.
        """
        try:
            part = self._exchange.decoder(decoder, cache)
            self._tell(Sizes(size), self._followers)
            own = self.sum_weights(decoder.weights, on_progress)
            loaded = [own, *(self._wait_until_ready(follower, on_progress) for follower in self._followers)]
        except CannotShare as error:
            raise ConfigError(str(error)) from error
        except RankLost as error:
            if self._elsewhere is not None:
                raise  # the host of the rank may return: this worker restarts and waits for it
            raise ConfigError(str(error)) from error
        self._check_content(loaded, on_progress)
        self._check_weights(loaded)
        self.tell_all(KeepWeights())
        self.keep(lambda done, total: on_progress())
        if self._exchange.ring is None:
            return SharedModel(self._stored.spec, decoder, part, self)
        others, stage = [follower.orders for follower in self._followers], self.part.stage
        returned = ReturnedRows(self._exchange.ring, others, decoder.layers_started, stage.count)
        return StagedModel(self._stored.spec, decoder, part, self.all, returned, stage)

    def sum_weights(self, weights: Weights, on_progress: Callable[[], None]) -> Loaded:
        """Returns the checksums of this rank, which it computes once: on a GPU, before the cache takes its memory."""
        if self._own is None:
            self._own = self._checksums(weights, on_progress) if self._worker.rank_check_weights else Loaded()
        return self._own

    def _checksums(self, weights: Weights, on_progress: Callable[[], None]) -> Loaded:
        following, device = self.part.next, weights.embed.device
        of_next = checksums_from_checkpoint(self._stored, following.share, on_progress, following.stage, device)
        return Loaded(checksums(weights), of_next)

    def _check_content(self, loaded: Sequence[Loaded], on_progress: Callable[[], None]) -> None:
        """Raises ConfigError if the weight files of a rank on another host differ from those of this rank."""
        if self._elsewhere is None:
            return
        own = self._elsewhere.content(on_progress)
        if wrong := next((rank for rank, one in enumerate(loaded) if rank and one.content != own), 0):
            raise ConfigError(f"--model: rank {wrong} has read other weights than rank 0")

    def _check_weights(self, loaded: Sequence[Loaded]) -> None:
        """Raises RankDiffers if a rank has wrong weights. loaded: the message of each rank, in order."""
        try:
            check_slices([one.own for one in loaded], [loaded[rank - 1].of_next for rank in range(len(loaded))])
        except RankDiffers as error:
            self._end(error)
            raise

    def all(
        self,
        compute: str,
        inputs: ForwardInputs | Tensor,
        own: Callable[[bool], Tensor],
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """Lets all ranks compute a step. Raises RankLost, and passes on every exception of `own`.

        own: computes the step on this rank, and compares residual streams with other ranks if its argument is true.
        adapters: those of the step.
        After an error, ranks may wait for one another forever, so no rank computes any more.
        """
        checked = compute != LOGITS and self._is_checked()
        try:
            used = [(one.adapter.number, one.scale, one.of_all) for one in adapters]
            frame = order(compute, inputs, checked=checked, adapters=used)
            self._tell(frame, [one for one in self._followers if compute != LOGITS or not one.part.stage.index])
            return own(checked)
        except BaseException as error:
            self._end(error)
            raise

    def _is_checked(self) -> bool:
        """Counts a step, and returns whether ranks compare their residual streams in this step."""
        self._steps += 1
        every = self._worker.rank_check_steps
        return every > 0 and self._steps % every == 0

    def _end(self, error: BaseException) -> None:
        if isinstance(error, RankDiffers) and self._differs is None:
            self._differs = error
            log.error("%s: all ranks end", error)
        self._exchange.end()

    def tell_all(self, frame: msgspec.Struct) -> None:
        """Sends a frame to all other ranks. Any thread may call it. Raises RankLost."""
        self._tell(frame, self._followers)

    def _tell(self, frame: msgspec.Struct, followers: Sequence[Follower]) -> None:
        if self._differs is not None:
            raise self._differs
        if self._exchange.lost:
            raise RankLost("a process that computes a part of the model has died")
        try:
            with self._sending:
                for follower in followers:
                    send(follower.orders, frame)
        except OSError as error:
            raise RankLost(f"a process that computes a part of the model does not listen: {error.strerror}") from error

    def _wait_until_ready(self, follower: Follower, on_progress: Callable[[], None]) -> Loaded:
        answer = self._answer(follower, on_progress)
        assert isinstance(answer, Loaded)
        return answer

    def _answer(self, follower: Follower, on_progress: Callable[[], None]) -> Answer:
        while not select.select([follower.orders], [], [], POLL_S)[0]:
            on_progress()
        try:
            answer: Answer = msgspec.msgpack.decode(receive(follower.orders), type=Answer)
        except (EOFError, OSError):
            raise RankLost(f"rank {follower.rank}: {follower.wait_for_end()} while it loaded") from None
        if isinstance(answer, Loaded) and answer.problem:
            raise ConfigError(f"rank {follower.rank}: {answer.problem}")
        return answer

    def _watch(self, follower: Follower) -> None:
        how = follower.wait_for_end()
        log.error("rank %d (process %d): %s", follower.rank, follower.pid, how)
        self._exchange.end()


class SharedModel:
    """A model of which each rank has a part of each layer. It has the interface of Decoder."""

    pipeline: None = None  # no step is begun before the last one has ended

    def __init__(self, spec: ModelSpec, decoder: Decoder, part: RankDecoder, leader: Leader) -> None:
        self.spec, self.operations, self.max_positions = spec, decoder.operations, decoder.max_positions
        self.layers_started, self.count_replayed = decoder.layers_started, decoder.count_replayed
        self._part, self._leader = part, leader
        self._adapters: Sequence[AdapterRows] = ()

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        part = self._part

        def own(checked: bool) -> Tensor:
            return part.logits(part.hidden(inputs, checked=checked))

        return self._leader.all(BOTH, inputs, own, self._adapters)

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        part = self._part
        return self._leader.all(HIDDEN, inputs, lambda checked: part.hidden(inputs, checked=checked), self._adapters)

    def logits(self, h: Tensor) -> Tensor:
        return self._leader.all(LOGITS, h, lambda checked: self._part.logits(h))

    def with_operations(self, operations: Operations) -> "SharedModel":
        """Returns the model for a step with adapters."""
        other = copy(self)
        other._adapters = adapters_in(operations)
        other._part = self._part.with_adapters(other._adapters)
        return other


def round_bytes(spec: ModelSpec, tokens: int) -> int:
    """Returns the bytes that ranks exchange in one round. Most steps need one round; longer steps need several."""
    widest = max(spec.heads * spec.head_dim, *(largest_inner(spec, layer) for layer in spec.layers))
    return max(4 * spec.vocab_size, MOST_BYTES * tokens * widest)


def _start_all(
    parts: Sequence[Part], model: ModelConfig, worker: WorkerConfig, size: int, loads: int, device: torch.device
) -> tuple[Exchange, list[Follower]]:
    """Starts all ranks but this one.

    size: bytes that the ranks of a stage share. loads: see Beginning. device: of this rank
    """
    exchanged = exchange_on(device)
    size = 0 if exchanged == ON_GPUS else size
    shared = [os.memfd_create("sluice-ranks", os.MFD_CLOEXEC) for _ in range(parts[0].stage.count)]
    for memory in shared:
        os.ftruncate(memory, size)
    rows = _connected(parts)
    followers = [
        _start(
            part, Beginning(model, worker, part.rank, size, exchange=exchanged, loads=loads), shared[part.stage.index],
            rows[part.rank],
        )
        for part in parts[1:]
    ]  # fmt: skip
    exchange = exchange_of_machine(parts[0], exchanged, shared[0], size, rows[0], device)
    for memory in shared:
        os.close(memory)
    return exchange, followers


def _connected(parts: Sequence[Part]) -> list[dict[int, socket.socket]]:
    """Returns the connections of each rank to those before and after it in a ring of stages, by rank."""
    rows: list[dict[int, socket.socket]] = [{} for _ in parts]
    for part in parts:
        if part.after != part.rank and part.after not in rows[part.rank]:
            rows[part.rank][part.after], rows[part.after][part.rank] = socket.socketpair()
    return rows


def _start(part: Part, begin: Beginning, shared: int, rows: Mapping[int, socket.socket]) -> Follower:
    ours, theirs = socket.socketpair()
    words: Sequence[str] = (
        sys.executable, *FOLLOWER, str(os.getpid()), str(theirs.fileno()), str(shared),
    )  # fmt: skip
    files = {rank: link.fileno() for rank, link in rows.items()}
    passed = (theirs.fileno(), shared, *files.values(), *([begin.loads] if begin.loads >= 0 else []))
    process = subprocess.Popen(words, pass_fds=passed, stdin=subprocess.DEVNULL)
    send(ours, msgspec.structs.replace(begin, rows=files))
    for link in (theirs, *rows.values()):
        link.close()
    return Follower(part, process.pid, ours, lambda: f"ended with code {process.wait()}")


# Keeps a rank on the processors of one NUMA node, so that its memory is near. Does nothing if there is one node.

NODES = Path("/sys/devices/system/node")


def stay_on_node(rank: int, count: int) -> None:
    """Keeps this process, and the threads that it starts later, on the node of its rank."""
    if mine := processors_of(rank, count, nodes(), os.sched_getaffinity(0)):
        os.sched_setaffinity(0, mine)


def processors_of(rank: int, count: int, by_node: Mapping[int, Set[int]], allowed: Set[int]) -> Set[int]:
    """Returns the processors of a rank; an empty set if the rank should not be restricted.

    Ranks are assigned to the nodes in order. If there are fewer ranks than nodes, a rank gets several nodes.
    """
    usable = [mine for _, of_node in sorted(by_node.items()) if (mine := of_node & allowed)]
    if len(usable) < 2:
        return set()
    first, end = rank * len(usable) // count, (rank + 1) * len(usable) // count
    return set().union(*usable[first : max(end, first + 1)])


def nodes(folder: Path = NODES) -> dict[int, set[int]]:
    """Returns the processors of each NUMA node, as Linux lists them; empty if Linux lists no nodes."""
    lists = {int(path.name.removeprefix("node")): path / "cpulist" for path in folder.glob("node[0-9]*")}
    return {node: _numbers(path.read_text()) for node, path in lists.items() if path.exists()}


def _numbers(text: str) -> set[int]:
    """Parses a list of ranges: "0-3,8" gives {0, 1, 2, 3, 8}."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


# Counts for each rank how often it had wrong numbers. The worker then ends, and the next worker shows the count.


class RankCounter:
    """Holds the Prometheus counter. Make it before the weights are loaded, because ranks are compared from then on."""

    def __init__(self, settings: Settings) -> None:
        self.counter = Counter(
            settings.frontend.metrics_prefix + "ranks_differed", "Times that a rank had wrong numbers.",
            ["rank"], registry=None,
        )  # fmt: skip
        for rank in range(settings.worker.ranks):
            self.counter.labels(rank)

    def count(self, error: BaseException | None) -> None:
        """Counts the error that made the worker end, if a rank with wrong numbers caused it."""
        while error is not None and not isinstance(error, RankDiffers):
            error = error.__cause__
        if error is not None:
            self.counter.labels(error.rank).inc()
