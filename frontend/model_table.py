"""The models that this frontend serves, by name. Each has its own tokenizer, service and worker pool.

Routes look up the model that a request names, and use its service. Knows no HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from frontend.errors import BadRequest, Unprocessable
from frontend.generation.service import Service
from frontend.model_context import ModelContext
from frontend.observability.metrics import ModelMetrics
from frontend.text.tokenizer import Tokenizer
from frontend.workers.pool import WorkerPool
from frontend.workers.status import DRAINING, READY, Readiness, not_ready
from shared.config.frontend import FrontendConfig
from shared.launcher_messages import Ask, Done, Download, ModelState
from shared.messages import Adapter, Limits
from shared.preset import TAG, Preset

if TYPE_CHECKING:
    from frontend.lora import AdapterRegistry


# What routes see of the launcher: the states of models, the progress of downloads, and answers to tickets.


class ToLauncher(Protocol):
    """The connection to the launcher, as routes use it."""

    @property
    def states(self) -> Mapping[str, ModelState]:
        """The launcher's last report about each model, by name."""

    @property
    def downloads(self) -> Mapping[str, Download]:
        """The last news of each running download, and of some that have ended, by name."""

    @property
    def news(self) -> int:
        """How many messages have come from the launcher, and how often the connection was lost."""

    async def next_news(self, seen: int) -> None:
        """Waits until `news` is more than `seen`."""

    def asking(self, make: Callable[[int], Ask], name: str = "") -> "AbstractContextManager[Asked]":
        """Asks the launcher something of the library, and yields the answer. At the end of the block, nobody waits for
        it any more.

        make: makes the message from its ticket; name: of the download whose progress belongs to the answer
        """


PULLING = "pulling manifest"  # the first line of a download


class Asked:
    """What a request waits for: the lines about a download, and the end. News of the same file replace each other, so a
    client that reads slowly keeps nothing in memory."""

    def __init__(self, name: str, running: Download | None) -> None:
        self.name = name
        self._lines = [running] if running is not None and not running.ended else []
        self._done: Done | None = None
        self._changed = asyncio.Event()

    def add(self, download: Download) -> None:
        if self._lines and self._lines[-1].digest == download.digest and self._lines[-1].status == download.status:
            self._lines.pop()
        self._lines.append(download)
        self._changed.set()

    def end(self, done: Done) -> None:
        self._done = done
        self._changed.set()

    async def lines(self, silent_s: float | None = None) -> AsyncIterator[Download]:
        """Yields the lines until the launcher has answered. `done` then has the answer.

        silent_s: if nothing new comes for so many seconds, the last line comes again
        """
        last = Download(self.name, PULLING)
        while True:
            lines, self._lines = self._lines, []
            for last in lines:
                yield last
            if self._done is not None and not self._lines:
                return
            try:
                async with asyncio.timeout(silent_s):
                    await self._changed.wait()
                self._changed.clear()
            except TimeoutError:
                yield last

    async def done(self) -> Done:
        """Waits for the answer."""
        async for _ in self.lines():
            pass
        assert self._done is not None
        return self._done


# The served models.


@dataclass(frozen=True)
class ServedModel:
    """A model with its names, its settings, and the service that runs its requests on its workers.

    names: all names of the model; responses state the first one
    config: how prompts are made, and how the output is parsed
    adapter: the LoRA adapter of the model; None: none
    base: the same model without the adapter or preset; None if there is neither
    preset: what a name that was made with /api/create adds to the model
    """

    names: tuple[str, ...]
    config: FrontendConfig
    service: Service
    metrics: ModelMetrics
    adapter: Adapter | None = None
    base: "ServedModel | None" = None
    preset: Preset | None = None

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        config: FrontendConfig,
        pool: WorkerPool,
        tokenizer: asyncio.Future[Tokenizer],
        metrics: ModelMetrics,
    ) -> "ServedModel":
        """Makes the entry of a model. `tokenizer` may still be loading, and `pool` may not have been started."""
        return cls(names, config, Service(pool, tokenizer, metrics, config.prefix_cache_scope), metrics)

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def listed_names(self) -> tuple[str, ...]:
        """The names that lists of models show: all but paths of this machine, which only requests may use.

        The first name is always listed.
        """
        return (self.name, *[name for name in self.names[1:] if not _is_path(name)])

    @property
    def pool(self) -> WorkerPool:
        return self.service.pool

    @property
    def limits(self) -> Limits | None:
        """The limits that the workers have reported; None before the first report."""
        welcome = self.pool.membership.welcome
        return welcome.limits if welcome else None

    @property
    def context(self) -> ModelContext:
        """The facts that are needed to read requests. Raises Overloaded while the tokenizer is loading."""
        return self._context.within(self.limits)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of responses; empty if no worker is ready, or if the workers' fingerprints differ."""
        return self.fingerprint_with(self.pool.membership.fingerprint)

    def fingerprint_with(self, worker: str) -> str:
        """Returns the fingerprint of answers from workers with the fingerprint `worker`; empty if it is not known."""
        return self._context.fingerprint_with(worker) if self.service.has_tokenizer else ""

    def flush_metrics(self) -> None:
        self.metrics.flush(self.pool.counters, self.pool.membership.statuses())

    @cached_property
    def _context(self) -> ModelContext:
        if self.base is None:
            return ModelContext.of(self.names, self.service.tokenizer, self.config)
        if self.preset is not None:
            return self.base._context.with_preset(self.name, self.preset)
        return replace(self.base._context, model=self.name, names=frozenset(self.names), adapter=self.adapter)

    def adapted(self, adapter: Adapter, *names: str) -> "ServedModel":
        """Returns this model with an adapter, under `names` or, if none are given, under its own names."""
        return replace(self, names=names or self.names, adapter=adapter, base=self)

    def dressed(self, name: str, preset: Preset) -> "ServedModel":
        """Returns this model under a name that was made for it."""
        return replace(self, names=(name,), preset=preset, base=self)


class ModelTable:
    """All models of a frontend, in the order in which they are listed. There is at least one."""

    def __init__(self, models: Sequence[ServedModel], registry: "AdapterRegistry | None" = None) -> None:
        """registry: the LoRA adapters of the first model, which requests select by name; None: no adapters

        Raises ValueError if two models have a name in common.
        """
        self._models, self.registry = tuple(models), registry
        self._adapters: dict[Adapter, ServedModel] = {}
        self._by_name = {name: model for model in models for name in model.names}
        if len(self._by_name) < sum(len(set(model.names)) for model in models):
            raise ValueError("two models have the same name")

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def first(self) -> ServedModel:
        """The model for requests that name no model or an unknown one.

        It also serves the routes whose requests cannot name a model: llama.cpp's /props and /slots, /tokenizer_info,
        and the task in /ready.
        """
        return self._models[0]

    def get(self, name: str) -> ServedModel | None:
        """Returns the model or the adapter that has exactly this name."""
        found = self._by_name.get(name)
        adapter = self.registry.adapters.get(name) if found is None and self.registry is not None else None
        return found if adapter is None else self._with(adapter)

    @property
    def adapters(self) -> list[ServedModel]:
        """The adapters of the first model. Each entry is the first model with one adapter, under the adapter's name."""
        known = [] if self.registry is None else [*self.registry.adapters.values()]
        self._adapters = {adapter: self._with(adapter) for adapter in known}
        return [*self._adapters.values()]

    @property
    def presets(self) -> list[ServedModel]:
        """The names that clients have made for models, each as the model with its defaults."""
        return []

    def scaled(self, scales: Mapping[int, float]) -> ServedModel:
        """Returns the first model, with the adapter whose scale is not 0 if there is one.

        scales: by adapter index. Raises Unprocessable for an unknown index, and if several scales are not 0.
        """
        known = [] if self.registry is None else [*self.registry.adapters.values()]
        used = scaled_adapter(known, scales, "lora")
        return self.first if used is None else self.first.adapted(used)

    def by_default(self, found: ServedModel) -> ServedModel:
        """Returns `found` with the registry's default adapter, if there is a default and `found` has no adapter yet.

        Responses still state the name of the base model.
        """
        default = None if self.registry is None or found.adapter is not None else self.registry.default
        return found if default is None else self.first.adapted(default)

    def _with(self, adapter: Adapter) -> ServedModel:
        if adapter not in self._adapters:
            self._adapters[adapter] = self.first.adapted(adapter, adapter.name)
        return self._adapters[adapter]

    def find(self, name: str | None) -> ServedModel:
        """Returns the model of this name, or the first model if no model has this name.

        No name is refused here. The API formats refuse names (`check_model`), because each has its own error message.
        """
        name = name or ""
        found = (self.get(written) for written in (name, name.removesuffix(TAG), name + TAG))
        return next((model for model in found if model is not None), self.first)

    async def usable(
        self, found: ServedModel, name: str | None, *, computing: bool = True, keep_alive: object = None
    ) -> ServedModel:
        """Waits until the model `found`, which the request called `name`, can serve. Raises Overloaded if it cannot.

        computing: whether the request needs a worker; else it needs only the tokenizer
        keep_alive: how long the model stays loaded after this request, if models are unloaded here; None: the default
        """
        if computing:
            await found.service.wait_for_handshake()
        return found

    @property
    def waited_for(self) -> Callable[["asyncio.Task[object] | None"], str] | None:
        """Maps a request's task to the name of the model it waits for, or to "". None if requests never wait."""
        return None

    def state_of(self, name: str) -> ModelState | None:
        """Returns the launcher's report about a model; None if all models always stay loaded."""
        return None

    def load(self, name: str) -> None:
        """Asks the launcher to load a model. Called, like `keep`, only where models are loaded on demand."""
        raise NotImplementedError

    def keep(self, name: str, seconds: float | None) -> None:
        """Sets how long a model stays loaded without requests, see shared.launcher_messages.Keep."""
        raise NotImplementedError

    @property
    def asleep(self) -> bool:
        """Whether all models are unloaded until a request to /wake_up."""
        return False

    async def sleep(self, asleep: bool) -> None:
        """Unloads all models and waits for it, or ends the sleep. Raises BadRequest if models always stay loaded."""
        text = (
            "this server has one model, which is always loaded; with --models, --models-dir or several --model it can"
        )
        raise BadRequest(text, code="not_allowed")

    @property
    def library(self) -> ToLauncher | None:
        """The way to the launcher, which fetches and names models. None if clients may do neither (--allow-pull)."""
        return None

    @property
    def changes(self) -> ToLauncher | None:
        """The way to the launcher's reports about models; None if all models always stay loaded."""
        return None

    async def reload(self) -> None:
        """Reads the table of models again, if models are loaded on demand. Raises BadRequest if this fails."""

    @property
    def readiness(self) -> Readiness:
        """Whether the server can serve requests for every model now and, if not, why."""
        each = [(model.name, model.service.readiness) for model in self._models]
        if all(readiness.ready for _, readiness in each):
            return READY
        if len(each) == 1:
            return each[0][1]
        if all(readiness.code == DRAINING.code for _, readiness in each):
            return DRAINING
        return not_ready("; ".join(f"{name}: {readiness.text}" for name, readiness in each if not readiness.ready))

    @property
    def draining(self) -> bool:
        return any(model.service.draining for model in self._models)

    def flush_metrics(self) -> None:
        for model in self._models:
            model.flush_metrics()

    # the life of the process

    async def start(self) -> None:
        """Starts the pools of all models. Raises ConfigError if a worker's address cannot be used."""
        for model in self._models:
            await model.pool.start()

    async def drain(self, timeout: float) -> None:
        """Admits no more requests, lets running ones finish within `timeout` seconds, and then ends the others."""
        await asyncio.gather(*(model.service.drain(timeout) for model in self._models))

    async def close(self) -> None:
        """Fails all running requests, and closes all connections to workers."""
        for model in self._models:
            await model.pool.close()


def _is_path(name: str) -> bool:
    return name.startswith(("/", "~", "./", "../")) or Path(name).exists()


def scaled_adapter(known: Sequence[Adapter], scales: Mapping[int, float], field: str) -> Adapter | None:
    """Returns the one adapter whose scale is not 0; None if there is none. scales: index in `known` → scale

    field: the request field, for errors. Raises Unprocessable for an unknown index, and if several scales are not 0.
    """
    if scales and max(scales) >= len(known):
        raise Unprocessable(f"`{field}`: there is no adapter {max(scales)}", param=field, code="out_of_range")
    used = [structs.replace(known[id], scale=scale) for id, scale in scales.items() if scale]
    if len(used) > 1:
        raise Unprocessable(f"`{field}`: only one adapter may have a scale other than 0", param=field)
    return used[0] if used else None
