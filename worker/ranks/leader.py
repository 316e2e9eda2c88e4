"""Rank 0's side: starts the other ranks, and has them compute every step that it computes."""

import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.config import ConfigError, ModelConfig, WorkerConfig
from worker.kernels.cpu.ranks_c import RankLost, RanksC, shared_bytes
from worker.kernels.operations import Operations
from worker.kv_cache.sizing import PoolSize
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.model.inputs.forward_inputs import ForwardInputs
from worker.model.share import CannotShare, Share, check, largest_inner
from worker.ranks.frames import BOTH, HIDDEN, LOGITS, Beginning, Sizes, order, send
from worker.ranks.nodes import stay_on_node
from worker.ranks.part import PartDecoder
from worker.spec import ModelSpec

log = logging.getLogger("sluice.ranks")

MOST_BYTES = 4  # of a number that is exchanged
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Follower:
    """Another rank, seen from rank 0."""

    rank: int
    process: "subprocess.Popen[bytes]"
    orders: socket.socket


class Leader:
    """All ranks of a worker, seen from rank 0."""

    def __init__(self, spec: ModelSpec, device: torch.device, model: ModelConfig, worker: WorkerConfig) -> None:
        """Starts the other ranks, which begin to load. Raises ConfigError if they cannot share the model."""
        count = worker.tensor_parallel_size
        if device.type != "cpu":
            raise ConfigError(f"--tensor-parallel-size {count} is for the CPU so far; use 1, or --device cpu")
        try:
            check(spec, count)
        except CannotShare as error:
            raise ConfigError(str(error)) from error
        self.share, self._spec = Share(0, count), spec
        size = shared_bytes(_round_bytes(spec, worker.max_step_tokens))
        shared = os.memfd_create("sluice-ranks", os.MFD_CLOEXEC)
        os.ftruncate(shared, size)
        self._ranks = RanksC(mmap.mmap(shared, size), 0, count)
        self._followers = [_start(Beginning(model, worker, rank, count, size), shared) for rank in range(1, count)]
        os.close(shared)
        stay_on_node(0, count)
        for follower in self._followers:
            threading.Thread(target=self._watch, args=(follower,), name="rank", daemon=True).start()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks, in order."""
        return os.getpid(), *(follower.process.pid for follower in self._followers)

    def model(self, decoder: Decoder, cache: KVCache, size: PoolSize, on_progress: Callable[[], None]) -> "SharedModel":
        """Returns the model for the runner, when all ranks have loaded their parts.

        decoder, cache: those of this rank. Raises ConfigError if another rank has ended.
        """
        try:
            part = PartDecoder(decoder, cache, self._ranks)
            self._tell(Sizes(size))
            for follower in self._followers:
                self._wait_until_ready(follower, on_progress)
        except (CannotShare, RankLost) as error:
            raise ConfigError(str(error)) from error
        return SharedModel(self._spec, decoder, part, self)

    def all(self, compute: str, inputs: ForwardInputs | Tensor, own: Callable[[], Tensor]) -> Tensor:
        """Has all ranks compute the same; `own` computes it on this one. Raises RankLost, and whatever `own` raises.

        After an error the ranks may wait for different things, so none of them computes any more.
        """
        try:
            self._tell(order(compute, inputs))
            return own()
        except BaseException:
            self._ranks.end()
            raise

    def _tell(self, frame: object) -> None:
        if self._ranks.lost:
            raise RankLost("a process that computes a part of the model has died")
        try:
            for follower in self._followers:
                send(follower.orders, frame)  # type: ignore[arg-type]
        except OSError as error:
            raise RankLost(f"a process that computes a part of the model does not listen: {error.strerror}") from error

    def _wait_until_ready(self, follower: Follower, on_progress: Callable[[], None]) -> None:
        while not select.select([follower.orders], [], [], POLL_S)[0]:
            on_progress()
        if not follower.orders.recv(1):
            raise RankLost(f"rank {follower.rank} ended with code {follower.process.wait()} while it loaded")

    def _watch(self, follower: Follower) -> None:
        code = follower.process.wait()
        log.error("rank %d (process %d) ended with code %d", follower.rank, follower.process.pid, code)
        self._ranks.end()


class SharedModel:
    """Has the interface of Decoder, and computes with all ranks."""

    def __init__(self, spec: ModelSpec, decoder: Decoder, part: PartDecoder, leader: Leader) -> None:
        self.spec, self.operations, self.max_positions = spec, decoder.operations, decoder.max_positions
        self.layers_started, self.count_replayed = decoder.layers_started, decoder.count_replayed
        self._part, self._leader = part, leader

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        part = self._part
        return self._leader.all(BOTH, inputs, lambda: part.logits(part.hidden(inputs)))

    def hidden(self, inputs: ForwardInputs, cache: KVCache) -> Tensor:
        return self._leader.all(HIDDEN, inputs, lambda: self._part.hidden(inputs))

    def logits(self, h: Tensor) -> Tensor:
        return self._leader.all(LOGITS, h, lambda: self._part.logits(h))

    def with_operations(self, operations: Operations) -> Decoder:
        raise NotImplementedError("settings_check.py refuses what needs other operations with several ranks")


def _round_bytes(spec: ModelSpec, tokens: int) -> int:
    """Returns the bytes of a round of the exchange: the rows of most steps need one round, longer steps several."""
    widest = max(spec.heads * spec.head_dim, *(largest_inner(spec, layer) for layer in spec.layers))
    return max(4 * spec.vocab_size, MOST_BYTES * tokens * widest)


def _start(begin: Beginning, shared: int) -> Follower:
    ours, theirs = socket.socketpair()
    words: Sequence[str] = (
        sys.executable, "-m", "worker.follower", str(os.getpid()), str(theirs.fileno()), str(shared),
    )  # fmt: skip
    process = subprocess.Popen(words, pass_fds=(theirs.fileno(), shared), stdin=subprocess.DEVNULL)
    theirs.close()
    send(ours, begin)
    return Follower(begin.rank, process, ours)
