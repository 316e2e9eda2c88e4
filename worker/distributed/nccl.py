"""The exchange of columns between ranks on GPUs, by torch.distributed: NCCL, or gloo where the tests run on CPUs.

It only ever gathers: no sum goes across ranks, as the order of such sums depends on the number of ranks.
"""

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # names of its API

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from worker.device import pick_device
from worker.distributed.checks import RankDiffers, checksum, differing
from worker.distributed.messages import IN_C, ON_GPUS
from worker.kv_cache.tensors import KVCache
from worker.lora.ops import AdapterRows
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.sharding import Part
from worker.operations import Exchange, Operations
from worker.ops.exchange import RankLost
from worker.ops.linear.packed import PackedLinear

JOIN_S = 120  # how long ranks wait for each other at start
STEP_S = 600  # after this time in one exchange, torch.distributed gives up; --stall-timeout ends the worker before
# Rank 0 ends all ranks if one is lost. By default, a thread of PyTorch would abort this process when NCCL fails.
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
LOST = "a process that computes a part of the model has died"


class ShardGroup:
    """The ranks that share the layers of a stage, as one of them sees it. A process has one such group at most."""

    def __init__(self, rank: int, count: int, store: Callable[[], Store], device: torch.device) -> None:
        """Exchanges nothing before join(). store: opens the store in which the `count` ranks find each other."""
        self.rank, self.count, self._store, self._device = rank, count, store, device
        self._lost = threading.Event()

    def join(self) -> None:
        """Waits for the other ranks, and connects to them, which takes memory of the GPU. Raises RankLost."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        on_gpu = self._device.type == "cuda"
        try:
            store = self._store()
            store.set_timeout(timedelta(seconds=JOIN_S))
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=self.rank, world_size=self.count,
                timeout=timedelta(seconds=STEP_S), device_id=self._device if on_gpu else None,
            )  # fmt: skip
            atexit.register(self._leave)
            if self.lost:  # end() may have found no group yet
                _abort()
            self.gather(torch.zeros(1, 1, device=self._device))
        except RuntimeError as error:
            raise RankLost(f"the ranks of a stage do not find each other: {_first_line(error)}") from error
        self.settle()

    def gather(self, own: Tensor) -> Tensor:
        """Returns the columns of all ranks [T, count * N] in the order of the ranks; each gives `own` [T, N].

        On a GPU, this only launches the exchange: see settle(). Raises RankLost.
        """
        if self.lost:
            raise RankLost(LOST)
        own = own.contiguous()
        rows, columns = own.shape
        parts = own.new_empty(self.count, rows, columns)
        try:
            _all_gather(parts.view(torch.uint8).view(-1), own.view(torch.uint8).view(-1))
        except RuntimeError as error:
            raise RankLost(f"{LOST}: {_first_line(error)}") from error
        return side_by_side(parts)

    def settle(self) -> None:
        """Waits until the device has computed all that was launched. Raises RankLost if the exchange has ended.

        A device goes on with arbitrary numbers when end() breaks off an exchange. So results are used only after this.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.lost:
            raise RankLost(LOST)

    @property
    def lost(self) -> bool:
        """Whether the exchange has ended."""
        return self._lost.is_set()

    def end(self) -> None:
        """Makes this rank stop waiting for the others, now and later. Any thread may call it."""
        if not self._lost.is_set():
            self._lost.set()
            _abort()

    def _leave(self) -> None:
        """Ends threads of torch.distributed: with them, the interpreter would abort the process at its end."""
        self.end()
        with suppress(RuntimeError, ValueError, AssertionError):  # the group is broken or gone already
            dist.destroy_process_group()


def _abort() -> None:
    """Breaks off exchanges that wait for other ranks: their kernels would occupy the GPU for ever."""
    with suppress(RuntimeError):
        if (group := dist.group.WORLD) is not None:
            group.abort()


def _all_gather(into: Tensor, own: Tensor) -> None:
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gather(into, own)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shard_group_in_memory(part: Part, memory: int, device: torch.device) -> ShardGroup | None:
    """Returns the ranks of one machine that share the layers of `part`; None if it has all heads.

    memory: the file descriptor of empty memory that these ranks share, in which they find each other
    """
    return _shard_group(part, device, lambda: FileStore(f"/proc/self/fd/{memory}", part.tp_size))


def shard_group_over_tcp(part: Part, host: str, port: int, device: torch.device) -> ShardGroup | None:
    """Does the same for ranks on several hosts. host, port: of rank 0, which listens there from join() on."""

    def store() -> Store:
        shared = TCPStore(host, port, is_master=not part.rank, timeout=timedelta(seconds=JOIN_S))
        return PrefixStore(f"stage {part.stage.index}", shared)

    return _shard_group(part, device, store)


def _shard_group(part: Part, device: torch.device, store: Callable[[], Store]) -> ShardGroup | None:
    return ShardGroup(part.tp_rank, part.tp_size, store, device) if part.tp_size > 1 else None


# The operations of a rank that has some rows of each weight: around each product, all ranks gather their columns.
#
# Only linears after a mixer or an activation need columns of other ranks: their inputs are gathered before the product,
# and their outputs after it. Every product thus adds up the same numbers in the same order as without ranks. Nothing is
# ever summed across ranks. The C library exchanges columns at the same places (worker/models/csrc/decoder.c).

Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class OperationsOfRank(Operations):
    """Operations that gather. columns: [T, own columns] → [T, columns of all ranks], in the order of the ranks."""

    columns: Gather

    def all_columns(self, x: Tensor) -> Tensor:
        return self.columns(x)

    def linear_add_norm(
        self, x: Tensor, packed: PackedLinear, residual: Tensor, weight: Tensor | None, eps: float, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """x [T, own inputs], packed: own rows of the weight. residual and the results [T, H]: whole."""
        product = self.columns(self.linear(self.columns(x), packed))
        return self.add_rms_norm(product, residual, weight, eps, **how)


def gathering(rank: int, count: int, columns: Gather) -> Exchange:
    """Returns the exchange of a decoder (worker/models/decoder.py) that has the share `rank` of `count`."""

    def exchange(plain: Operations) -> Operations:
        own = {item.name: getattr(plain, item.name) for item in fields(Operations)}
        own["experts"] = partial(_experts, plain.experts, rank, count, columns)
        return OperationsOfRank(**own, columns=columns)

    return exchange


def rehearsing(count: int) -> Exchange:
    """Returns an exchange that asks no other rank: each rank's columns stand in for those of all `count` ranks.

    Checks and measurements before serving use it, because each rank does them in its own time. It takes as much memory
    as the exchange does.
    """
    return gathering(0, count, lambda own: side_by_side(own.repeat(count, 1, 1)))


def side_by_side(parts: Tensor) -> Tensor:
    """Returns the columns of all ranks [T, ranks * N], which come as [ranks, T, N]."""
    ranks, rows, columns = parts.shape
    return parts.transpose(0, 1).reshape(rows, ranks * columns)


def _experts(
    plain: Callable[..., Tensor], rank: int, count: int, columns: Gather, h: Tensor, *args: Any,
    add: Tensor | None = None, **how: Any,
) -> Tensor:  # fmt: skip
    """Computes the operation `experts`. add [T, H]: of which each rank adds its own columns"""
    if add is not None:
        size = add.shape[1] // count
        add = add[:, rank * size : (rank + 1) * size]
    return columns(plain(h, *args, add=add, gather=columns, **how))


# The decoder of a rank on a GPU that has a part of each layer. It computes each step together with the other ranks.


class GatheringDecoder:
    """The decoder of one rank. All ranks call the same methods with equal arguments, and get equal results."""

    def __init__(self, decoder: Decoder, cache: KVCache, shards: ShardGroup, first: int = 0) -> None:
        """decoder: has the spec and weights of this rank (models/sharding.py). first: the first rank of `shards`"""
        self._decoder = copy(decoder)
        self._decoder.exchange = gathering(shards.rank, shards.count, shards.gather)
        self._cache, self._shard_group, self._first = cache, shards, first

    def with_adapters(self, adapters: Sequence[AdapterRows]) -> "GatheringDecoder":
        """Returns the decoder for a step: this one, as workers with several GPUs are refused to have adapters."""
        assert not adapters
        return self

    def hidden(self, inputs: ForwardInputs, *, checked: bool = False) -> Tensor:
        """Computes the same as Decoder.hidden of the whole model, and waits for the result. Raises RankLost.

        checked: whether ranks compare the result, which every rank has in full. If it differs, rank 0 raises
            RankDiffers.
        """
        h = self._decoder.hidden(inputs, self._cache)
        if checked:
            self._compare(checksum(h))
        self._shard_group.settle()
        return h

    def _compare(self, own: int) -> None:
        sums = self._shard_group.gather(torch.tensor([[own]], device=self._cache.device)).flatten().tolist()
        if self._shard_group.rank == 0 and (rank := differing(sums)) is not None:
            raise RankDiffers(self._first + rank, "has another residual stream than most ranks")

    def logits(self, h: Tensor) -> Tensor:
        """Computes the same as Decoder.logits of the whole model, and waits for the result. Raises RankLost."""
        logits = self._decoder.logits(h)
        self._shard_group.settle()
        return logits


# Chooses the GPU of a rank: on each machine, the first rank has the first GPU, and so on.


def device_of_rank(worker: WorkerConfig, place: int = 0, here: int = 0) -> torch.device:
    """Returns the device of one of several ranks. A GPU becomes the current one of this thread.

    place: the index of the rank among the `here` ranks of this machine; here 0: all ranks are on it. On the CPU, ranks
    share the device. Raises ConfigError if there are fewer GPUs than ranks, and what pick_device() raises.
    """
    if worker.device != "cpu" and place < torch.cuda.device_count():
        torch.cuda.set_device(place)  # before pick_device(), which allocates memory on the current GPU
    device = pick_device(worker.device)
    if device.type != "cuda":
        return device
    check_count(worker, torch.cuda.device_count(), here)
    return torch.device("cuda", place)


def check_count(worker: WorkerConfig, found: int, here: int = 0) -> None:
    """Raises ConfigError if there are fewer GPUs on this machine than ranks. See device_of_rank."""
    needed = here or worker.ranks
    if found >= needed:
        return
    sizes = {
        "--tensor-parallel-size": worker.tensor_parallel_size,
        "--pipeline-parallel-size": worker.pipeline_parallel_size,
    }
    flags = " times ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    there = " on this machine" if here else ""
    raise ConfigError(
        f"{flags} needs {needed} GPUs{there}, one for each process, and there {'is' if found == 1 else 'are'} "
        f"{found}{named}; use fewer processes, or --device cpu"
    )


def check_features(model: ModelConfig, worker: WorkerConfig) -> None:
    """Raises ConfigError for settings that several GPUs computing one model together do not support."""
    given = {
        "--lora-modules": model.lora_modules, "--allow-runtime-lora": model.allow_runtime_lora,
        "--expert-metrics": worker.expert_metrics,
    }  # fmt: skip
    if wrong := next((flag for flag, value in given.items() if value), ""):
        raise ConfigError(f"{wrong} does not work with {worker.ranks_flag} above 1 on GPUs; leave one of both out")


def exchange_on(device: torch.device) -> str:
    """Returns how ranks with this device exchange columns: a value of Beginning.exchange (messages.py)."""
    return ON_GPUS if device.type == "cuda" else IN_C
