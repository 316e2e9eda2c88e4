"""The exchange of columns between ranks on GPUs, by torch.distributed: NCCL, or gloo where the tests run on CPUs.

It only ever gathers: no sum goes across ranks, as the order of such sums depends on the number of ranks.
"""

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # names of its API

from worker.kernels.cpu.ranks_c import RankLost
from worker.model.parts.part import Part
from worker.ranks.gpu.operations import side_by_side

JOIN_S = 120  # how long ranks wait for each other at start
STEP_S = 600  # after this time in one exchange, torch.distributed gives up; --stall-timeout ends the worker before
# Rank 0 ends all ranks if one is lost. By default, a thread of PyTorch would abort this process when NCCL fails.
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
LOST = "a process that computes a part of the model has died"


class Lanes:
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


def lanes_in_memory(part: Part, memory: int, device: torch.device) -> Lanes | None:
    """Returns the ranks of one machine that share the layers of `part`; None if it has all heads.

    memory: the file descriptor of empty memory that these ranks share, in which they find each other
    """
    return _lanes(part, device, lambda: FileStore(f"/proc/self/fd/{memory}", part.lanes))


def lanes_over_tcp(part: Part, host: str, port: int, device: torch.device) -> Lanes | None:
    """Does the same for ranks on several hosts. host, port: of rank 0, which listens there from join() on."""

    def store() -> Store:
        shared = TCPStore(host, port, is_master=not part.rank, timeout=timedelta(seconds=JOIN_S))
        return PrefixStore(f"stage {part.stage.index}", shared)

    return _lanes(part, device, store)


def _lanes(part: Part, device: torch.device, store: Callable[[], Store]) -> Lanes | None:
    return Lanes(part.lane, part.lanes, store, device) if part.lanes > 1 else None
