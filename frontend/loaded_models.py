"""The table of models that are loaded on demand. Only a loaded model has a tokenizer and connections to a worker.

Requests get a model by `usable`, which waits until the model can serve. All requests that wait share one load.
"""

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from frontend.errors import BadRequest, Overloaded, unknown_model
from frontend.launcher_link import LOST, LauncherLink
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import ModelMetrics, Residence
from frontend.text.tokenizer import Tokenizer
from frontend.workers.membership import Discovery
from frontend.workers.pool import WorkerPool
from frontend.workers.status import DRAINING, READY, Readiness, not_ready
from shared.address import parse_all
from shared.config.settings import Settings, with_values
from shared.launcher_messages import Keep, Load, ModelState, Unusable
from shared.model_library import read_presets
from shared.model_list import Entry, read_entries, seconds_of, worker_folder
from shared.preset import TAG, Preset

log = logging.getLogger("sluice.models")
POLL_S = 0.02  # pause between two checks whether a loaded model can serve
GC_THRESHOLDS = (50_000, 20, 20)  # as in __main__.py, which also freezes the objects of a single model
LOADED_STATES = ("loading", "loaded", "unloading")


@dataclass(slots=True)
class LoadedModel:
    """A model of the table. When it is unloaded, `served` is replaced by an entry without tokenizer and connections.

    gone: whether the model was removed from the table
    """

    entry: Entry
    settings: Settings
    served: ServedModel
    tokenizer: "asyncio.Future[Tokenizer]"
    state: ModelState
    opened: asyncio.Task[None] | None = None  # connects to the worker and reads the tokenizer; None: not loaded
    failed_at: float = float("-inf")
    gone: bool = False

    @property
    def loaded(self) -> bool:
        return self.state.state == "loaded"


class LoadedModels(ModelTable):
    """The models of a frontend whose launcher loads models on demand."""

    def __init__(self, settings: Settings, entries: Sequence[Entry], metrics: Callable[[str], ModelMetrics]) -> None:
        """metrics: a function from the name of a model to its metrics"""
        self._settings = settings
        self._metrics = metrics
        self._link = LauncherLink(Path(settings.wire.run_dir), self._update)
        self._entries = {entry.name: entry for entry in entries}
        self._loaded = {entry.name: self._loaded_model(entry) for entry in entries}
        self._names = {name: entry.name for entry in entries for name in entry.names}
        self._presets: dict[str, Preset] = {}
        self._dressed: dict[str, ServedModel] = {}
        self._reading = 0  # the value of LauncherLink.reading when the entries were read
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[object] | None, str] = {}  # task → the model that it waits for
        self._is_draining = False
        super().__init__([one.served for one in self._loaded.values()])

    # called by the routes

    def __iter__(self) -> Iterator[ServedModel]:
        return iter([one.served for one in self._loaded.values() if not one.gone])

    @property
    def first(self) -> ServedModel:
        """The model for requests that name none: the only loaded model or, if there are none or several, the table's
        first."""
        loaded = [one.served for one in self._loaded.values() if one.loaded and not one.gone]
        return loaded[0] if len(loaded) == 1 else next(iter(self))

    def get(self, name: str) -> ServedModel | None:
        if name in self._presets and name not in self._names:
            return self._dress(name)
        return self._loaded[self._names[name]].served if name in self._names else None

    def _dress(self, name: str) -> ServedModel | None:
        """Returns the model of a preset's name; None if the table has no such model."""
        preset = self._presets[name]
        if preset.base not in self._names:
            return None
        served, made = self._loaded[self._names[preset.base]].served, self._dressed.get(name)
        if made is None or made.base is not served or made.preset is not preset:
            made = self._dressed[name] = served.dressed(name, preset)
        return made

    @property
    def presets(self) -> list[ServedModel]:
        return [made for name in self._presets if name not in self._names and (made := self._dress(name)) is not None]

    def _entry_name(self, name: str) -> str:
        """Returns the name of the table's entry that a model's or preset's name means; "" if there is none."""
        if name not in self._names and name in self._presets:
            name = self._presets[name].base
        return self._names.get(name, "")

    @property
    def library(self) -> LauncherLink | None:
        return self._link if self._settings.models.allow_pull else None

    @property
    def changes(self) -> LauncherLink:
        return self._link

    def state_of(self, name: str) -> ModelState | None:
        """Returns the launcher's last report about the model with this name."""
        entry = self._entry_name(name)
        return self._loaded[entry].state if entry else None

    @property
    def readiness(self) -> Readiness:
        """Whether the launcher can be asked for models. It does not matter which models are loaded."""
        if self._is_draining:
            return DRAINING
        if self._link.connected and self._link.asleep:
            return not_ready("asleep")
        return READY if self._link.connected else not_ready("no connection to the launcher")

    @property
    def asleep(self) -> bool:
        return self._link.asleep

    async def sleep(self, asleep: bool) -> None:
        """Starts or ends sleep. Raises Overloaded if requests still need a model after MOST_SLEEP_WAIT_S. Such a model
        is unloaded when the requests end."""
        if problem := await self._link.sleep(asleep):
            raise Overloaded(problem, code="asleep" if self.asleep else "not_ready", retry_after=RETRY_S)

    @property
    def draining(self) -> bool:
        return self._is_draining

    def flush_metrics(self) -> None:
        waiters = Counter(self._waiting.values())
        for name, one in self._loaded.items():
            one.served.metrics.residence = None if one.gone else Residence(one.state, waiters[name])
            one.served.flush_metrics()

    def find(self, name: str | None) -> ServedModel:
        return self._named(name or "") or self.first

    def _named(self, name: str) -> ServedModel | None:
        found = (self.get(written) for written in (name, name.removesuffix(TAG), name + TAG))
        return next((model for model in found if model is not None), None)

    async def usable(
        self, found: ServedModel, name: str | None, *, computing: bool = True, keep_alive: object = None
    ) -> ServedModel:
        """Returns the model when it can serve, and holds it (keeps it loaded) until the calling task has ended.

        Raises UnknownModel for an unknown name, Overloaded if the model cannot be loaded or is not ready within
        --load-wait, and BadRequest for a `keep_alive` that is no duration.
        """
        seconds = seconds_of_field(keep_alive)
        if name and not found.config.any_model_name and self._named(name) is None:
            raise unknown_model(name)
        one, task = self._loaded[(found if found.base is None else found.base).name], asyncio.current_task()
        self._waiting[task] = one.entry.name
        try:
            async with asyncio.timeout(self._settings.models.load_wait):
                await self._until_loaded(one)
                await self._until_serving(one)
        except TimeoutError:
            text = f"the model `{found.name}` is {one.state.state}, and was not ready in time"
            raise Overloaded(text, code="model_loading", retry_after=RETRY_S) from None
        finally:
            del self._waiting[task]
        if seconds is not None:
            self.keep(found.name, seconds)
        if found.preset is None:
            return one.served
        return one.served.dressed(found.name, found.preset) if (now := self.get(found.name)) is None else now

    @property
    def waited_for(self) -> Callable[["asyncio.Task[object] | None"], str]:
        return lambda task: self._waiting.get(task, "")

    async def _until_loaded(self, one: LoadedModel) -> None:
        """Waits until the launcher has loaded the model, and then holds it."""
        name = one.entry.name
        if self._link.asleep:
            raise asleep()
        if one.loaded:
            self._hold(name)
            return
        if one.state.state == "failed" and time.monotonic() < one.failed_at + RETRY_S:
            raise failure(one.state)
        attempts = one.state.attempts - (one.state.state == "loading")
        with self._link.wanting(name):
            while not one.loaded:
                if one.gone:
                    raise unknown_model(name)
                if self._link.asleep:
                    raise asleep()
                if one.state.state == "failed" and one.state.attempts > attempts:
                    raise failure(one.state)
                if self._is_draining:
                    raise Overloaded("not ready: draining", code=DRAINING.code, retry_after=RETRY_S)
                await self._changed.wait()
            self._hold(name)

    def _hold(self, name: str) -> None:
        """Keeps a model loaded until the end of the current task, which handles one HTTP request."""
        self._link.use(name)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._link.release(name))

    async def _until_serving(self, one: LoadedModel) -> None:
        """Waits until this frontend has the model's tokenizer and a connection to its worker, which may have been lost
        meanwhile."""
        while not one.served.service.readiness.ready and not self._is_draining:
            if one.state.state == "failed":
                raise failure(one.state)
            if one.tokenizer.done() and not one.tokenizer.cancelled() and (problem := one.tokenizer.exception()):
                raise failure(msgspec.structs.replace(one.state, reason=str(problem)))
            await asyncio.sleep(POLL_S)

    def load(self, name: str) -> None:
        """Makes the launcher load a model for which no request waits."""
        self._link.order(Load(self._entry_name(name)))

    def keep(self, name: str, seconds: float | None) -> None:
        """Sets how long a model stays loaded without requests, see shared.launcher_messages.Keep."""
        self._link.order(Keep(self._entry_name(name), seconds))

    async def reload(self) -> None:
        if problem := await self._link.reload():
            if problem == LOST:
                raise Overloaded(problem, code="not_ready", retry_after=1.0)
            raise BadRequest(f"the table of models was not read: {problem}", code="table_not_read")

    # called by the launcher link

    def _update(self) -> None:
        if self._reading != self._link.reading:
            self._read_table()
            self._reading = self._link.reading
        for one in self._loaded.values():
            state = self._link.states.get(one.entry.name, ModelState(one.entry.name, "unloaded"))
            if state.state == "failed" and (one.state.state, one.state.attempts) != ("failed", state.attempts):
                one.failed_at = time.monotonic()
            one.state = state
            if state.state in LOADED_STATES and one.opened is None and state.folder:
                one.opened = asyncio.create_task(self._open(one, state.folder))
            elif state.state in ("unloaded", "failed") and one.opened is not None:
                self._drop(one)
        self._renew()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _read_table(self) -> None:
        """Reads the table as the launcher has just written it. A loaded model keeps its old entry until it is
        unloaded."""
        entries = read_entries(Path(self._settings.models.models))
        self._presets = read_presets(Path(self._settings.models.models).parent)
        self._dressed = {name: one for name, one in self._dressed.items() if name in self._presets}
        self._entries = {entry.name: entry for entry in entries}
        self._names = {name: entry.name for entry in entries for name in entry.names}
        before = self._loaded
        self._loaded = {entry.name: before.get(entry.name) or self._loaded_model(entry) for entry in entries} | before
        for one in self._loaded.values():
            one.gone = one.entry.name not in self._entries

    def _renew(self) -> None:
        """Gives models that are not loaded their newest entries, and removes those that are no longer in the table."""
        for name, one in list(self._loaded.items()):
            if one.opened is not None or one.entry == self._entries.get(name):
                continue
            if one.gone:
                del self._loaded[name]
                one.served.metrics.workers, one.served.metrics.residence = (), None
            else:
                one.entry = self._entries[name]
                self._empty(one)

    def _loaded_model(self, entry: Entry) -> LoadedModel:
        """Makes a model of the table that is not loaded."""
        own: dict[str, object] = {name: value for name, value in entry.flags.items() if name != "kv_cache_gb"}
        own |= {"model": entry.model, "served_model_name": ",".join(entry.names)}
        settings = with_values(self._settings, own)
        tokenizer: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
        config, folder = settings.frontend, worker_folder(self._settings.wire.run_dir, entry.name)
        pool = WorkerPool(
            settings.wire,
            Discovery(parse_all(f"ipc://{folder}"), None),
            stall_timeout=config.stall_timeout,
            recovery_timeout=config.recovery_timeout,
            model=entry.name,
        )
        served = ServedModel.of(entry.names, config, pool, tokenizer, self._metrics(entry.name))
        return LoadedModel(entry, settings, served, tokenizer, ModelState(entry.name, "unloaded"))

    async def _open(self, one: LoadedModel, folder: str) -> None:
        """Connects to the worker of a model, and reads the model's tokenizer in a thread."""
        tokenizer, settings = one.tokenizer, one.settings
        await one.served.pool.start()
        load = partial(Tokenizer.load, Path(folder), settings.frontend.chat_template, settings.model.task)
        try:
            tokenizer.set_result(await asyncio.to_thread(load))
        except Exception as error:
            tokenizer.set_exception(error)
            tokenizer.exception()  # asyncio would otherwise warn that the exception was never retrieved
            log.error("the tokenizer of %s did not load: %s", one.entry.name, error)
            self._link.order(Unusable(one.entry.name, str(error)))

    def _drop(self, one: LoadedModel) -> None:
        """Cancels the opening of a model, closes its connections and discards its tokenizer."""
        assert one.opened is not None
        one.opened.cancel()
        closing = asyncio.create_task(one.served.pool.close(f"the model {one.entry.name} is {one.state.state}"))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        one.opened = None
        self._empty(one)

    def _empty(self, one: LoadedModel) -> None:
        """Replaces settings, tokenizer and pool of a model that is not loaded by new ones, made from its entry."""
        fresh = self._loaded_model(one.entry)
        one.settings, one.served, one.tokenizer = fresh.settings, fresh.served, fresh.tokenizer

    # start and end of the process

    async def start(self) -> None:
        gc.set_threshold(*GC_THRESHOLDS)
        self._running = asyncio.create_task(self._link.run())

    async def drain(self, timeout: float) -> None:
        self._is_draining = True
        self._changed.set()
        await asyncio.gather(*(one.served.service.drain(timeout) for one in self._loaded.values()))

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
        for one in self._loaded.values():
            await one.served.pool.close()


# The errors of requests for one of many models, and the field `keep_alive`.

RETRY_S = 10.0  # time after a failed load in which requests are refused without another attempt to load


def seconds_of_field(keep_alive: object) -> float | None:
    if keep_alive is None:
        return None
    try:
        if isinstance(keep_alive, bool) or not isinstance(keep_alive, str | int | float):
            raise ValueError("must be a duration like 300, 90s, 10m or -1")
        return seconds_of(keep_alive)
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"`keep_alive` {error}", param="keep_alive", code="out_of_range") from None


def asleep() -> Overloaded:
    return Overloaded("the server sleeps; POST /wake_up wakes it", code="asleep", retry_after=RETRY_S)


def failure(state: ModelState) -> Overloaded:
    text = f"the model `{state.name}` cannot be loaded: {state.reason}"
    return Overloaded(text, code="model_failed", retry_after=RETRY_S)
