"""Keeps adapters in memory, and reads them in a thread, so that steps continue meanwhile.

To make room for a new adapter, the least recently used adapter that no sequence uses is dropped. A later request for a
dropped adapter reads it from its folder again.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Protocol

from shared.adapters.files import AdapterError, AdapterFiles, read_files
from shared.adapters.named import path_problem
from shared.config import ModelConfig
from shared.messages import Adapter
from worker.adapters.loaded import LoadedAdapter, load_adapter
from worker.adapters.sites import Sites, sites_of
from worker.model.layer import Weights
from worker.model.parts.part import Part
from worker.schedule.admission import QueueFull
from worker.schedule.records.adapter_use import used_by
from worker.schedule.sequence import Sequence
from worker.spec import ModelSpec

log = logging.getLogger("sluice.adapters")

MAX_COUNTED, OTHERS = 100, "(others)"  # the maximum number of names in the metrics, and the label for all other names


class OtherRanks(Protocol):
    """The other processes that compute the model together with this one. They keep their parts of each adapter."""

    @property
    def part(self) -> Part:
        """The part of the model that this process has."""

    def give(self, number: int, files: AdapterFiles) -> None: ...
    def forget(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """An adapter in memory, or one that is being read. number: see LoadedAdapter"""

    number: int
    loaded: Future[LoadedAdapter]

    @property
    def failed(self) -> bool:
        return self.loaded.done() and self.loaded.exception() is not None


class AdapterStore:
    """The adapters in memory.

    most: the maximum number of adapters; max_rank: the maximum rank; wake: called in a thread after each read
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        weights: Weights,
        model: ModelConfig,
        *,
        most: int,
        max_rank: int,
        ranks: OtherRanks | None = None,
    ) -> None:
        """spec: of the whole model. weights: those of this process. ranks: None if this process has the whole model"""
        self.wake: Callable[[], None] = lambda: None
        self.most = most
        self._folder, self._spec, self._weights, self._model, self._max_rank = folder, spec, weights, model, max_rank
        self._ranks, self._numbers = ranks, count(1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapter")
        self.requests: dict[str, int] = {}  # adapter name → number of sequences that came with the adapter
        self._kept: OrderedDict[Adapter, Kept] = OrderedDict()  # the most recently used is last

    def __len__(self) -> int:
        return len(self._kept)

    def load(self, adapter: Adapter, live: Callable[[], Collection[Sequence]]) -> "Future[LoadedAdapter]":
        """Returns a future of the adapter, whose result() raises AdapterError. Raises QueueFull if there is no room.

        live: returns the live sequences, whose adapters must not be dropped
        """
        self._count(adapter.name)
        adapter = adapter.unscaled
        kept = self._kept.get(adapter)
        if kept is not None and not kept.failed:
            self._kept.move_to_end(adapter)
            return kept.loaded
        self._kept.pop(adapter, None)
        self._make_room(live)
        number = next(self._numbers)
        future = self._threads.submit(self._read, adapter, number)
        self._kept[adapter] = Kept(number, future)
        future.add_done_callback(lambda _: self.wake())
        return future

    def _count(self, name: str) -> None:
        own = name if name in self.requests or len(self.requests) < MAX_COUNTED else OTHERS
        self.requests[own] = self.requests.get(own, 0) + 1

    def _make_room(self, live: Callable[[], Collection[Sequence]]) -> None:
        if len(self._kept) < self.most:
            return
        used = used_by(live())
        oldest = next((adapter for adapter in self._kept if adapter not in used), None)
        if oldest is None:
            raise QueueFull(f"all {self.most} adapters in memory are in use (--max-cpu-loras)")
        dropped = self._kept.pop(oldest)
        if self._ranks is not None:
            self._threads.submit(self._ranks.forget, dropped.number)  # in the thread, and so after it was given

    def _read(self, adapter: Adapter, number: int) -> LoadedAdapter:
        try:
            if problem := path_problem(adapter.path, self._model):
                raise AdapterError(f"{adapter.path} {problem}")
            files = read_files(adapter.path)
            if files.sha256 != adapter.sha256:
                raise AdapterError(f"the files in {adapter.path} have changed since it was loaded")
            loaded = self._load(files, number)
        except AdapterError as error:
            raise AdapterError(f"`model`: the adapter {adapter.name!r} cannot be used: {error}") from None
        log.info("adapter %s: %s", adapter.name, adapter.path)
        return replace(loaded, number=number)

    def _load(self, files: AdapterFiles, number: int) -> LoadedAdapter:
        embed = self._weights.embed
        if self._ranks is None:
            return load_adapter(files, self._sites, embed.dtype, embed.device, self._max_rank)
        self._ranks.give(number, files)  # the other ranks pack their parts at the same time as this one
        try:
            return load_adapter(files, self._sites, embed.dtype, embed.device, self._max_rank)
        except BaseException:
            self._ranks.forget(number)
            raise

    @cached_property
    def _sites(self) -> Sites:
        part = None if self._ranks is None else self._ranks.part
        return sites_of(self._folder, self._spec, self._weights, part)

    def close(self) -> None:
        """Cancels reads that have not begun. Does not wait for a read that has begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
