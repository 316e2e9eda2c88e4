"""Decides which model is loaded next, and which models are unloaded for it. Handles no processes or sockets.

    unloaded ──► loading ──► loaded ──► unloading ──► unloaded
                    └──► failed ◄──┘       └──► loaded, if a request needs it after all

The account counts the memory of a model from the moment it begins to load until its process has ended, so that no
memory is promised twice. Models are loaded in the order of their first requests. While the first model in the queue
waits for memory, the others wait, too; otherwise small models could keep a large one out for ever.

Requests that follow each other closely could keep a model loaded for ever. So a model that others wait for has a turn,
at least TURN_S and as long as its loading took. Then it takes no more requests, and is unloaded when those that it has
are done. If they are not done after MOST_DRAIN_S, it goes on, and its next turn is longer.

The table may be replaced at any time. A loaded model keeps its old entry until it is unloaded. It is unloaded when no
request needs it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from deploy.launcher.child_command import DEMO, DEMO_MODEL, with_local_model
from deploy.launcher.many_sizes import GIB, PROCESS_BYTES, HubModels, Kept, weight_files, weights_bytes
from deploy.launcher.packaged_model import SMOLLM2
from shared.address import check_socket_path
from shared.config.check import check
from shared.config.declaration import ConfigError, flag_name
from shared.config.flags import Flag, all_flags
from shared.config.settings import ModelConfig, Settings, with_values
from shared.gguf.index import read_index
from shared.gguf.naming import is_translation, local_model, short_name
from shared.launcher_messages import State
from shared.machine import CPU_SHARE, available_bytes, visible_gpus
from shared.model_library import library_file, read_library, write_presets
from shared.model_list import Entry, checked, encode_entries, find_entries, read_entries, seconds_of, worker_folder

TURN_S = 10.0
MOST_DRAIN_S = 30.0
RETRY_S = 10.0  # after a failure, requests cause no attempt to load for this time


@dataclass(slots=True, eq=False)
class Slot:
    """A model of the table. Times are those of a monotonic clock, in seconds.

    keep_alive: how long the model stays loaded without requests; infinity: until its memory is needed
    nbytes: the model's memory in the account
    announced: the first version of the table that tells frontends about the unloading; 0: none does yet
    leaving: whether the newest table lacks this entry
    began: when its loading began
    turn_ends: when it must make room for models that wait, even if requests use it
    drains_since: since when it makes room although requests use it; None: it does not
    """

    entry: Entry
    keep_alive: float
    nbytes: int = 0
    state: State = "unloaded"
    reason: str = ""
    attempts: int = 0
    used_at: float = 0.0
    failed_at: float = -math.inf
    announced: int = 0
    used: bool = False  # whether a request uses the model now
    leaving: bool = False
    began: float = -math.inf
    turn_ends: float = -math.inf
    drains_since: float | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def counts(self) -> bool:
        """Whether the account counts memory for the model."""
        return self.state in ("loading", "loaded", "unloading")


@dataclass(slots=True)
class Account:
    """The models of the table, and the limits on the number and the memory of loaded models."""

    slots: dict[str, Slot] = field(init=False, default_factory=dict)
    entries: Sequence[Entry]  # the newest table
    keep_alive: float
    most_models: int
    most_bytes: int
    clock: Callable[[], float]
    size_of: Callable[[Entry], int]  # raises OSError or ValueError for a checkpoint that cannot be read
    asleep: bool = False  # whether all models are unloaded and none may be loaded
    _order: list[Slot] = field(default_factory=list)
    _front: Slot | None = None  # the first of the queue
    _waits_since: float = 0.0  # since when it is the first

    def __post_init__(self) -> None:
        self.renew()

    def keep_alive_of(self, entry: Entry) -> float:
        return math.inf if entry.pinned else self.keep_alive

    def replace(self, entries: Sequence[Entry]) -> None:
        """Records a new table. `renew` then applies it to all models, except those loaded under an old entry."""
        self.entries, newest = entries, {entry.name: entry for entry in entries}
        for slot in self.slots.values():
            slot.leaving = newest.get(slot.name) != slot.entry

    def renew(self) -> None:
        """Updates the slots to the newest table. Slots with an older entry stay as long as they take memory."""
        kept = {slot.name: slot for slot in self.slots.values() if slot.counts or not slot.leaving}
        self._order = [slot for slot in self._order if kept.get(slot.name) is slot]
        in_table = {entry.name: kept.get(entry.name) or self._new(entry) for entry in self.entries}
        self.slots = in_table | kept

    def _new(self, entry: Entry) -> Slot:
        """Returns a slot that continues the count of attempts, so that waiting requests recognize a new failure."""
        before = self.slots.get(entry.name)
        return Slot(entry, self.keep_alive_of(entry), attempts=before.attempts if before else 0)

    @property
    def loading(self) -> bool:
        return any(slot.state == "loading" for slot in self.slots.values())

    @property
    def nbytes(self) -> int:
        """The memory of all models that are loaded, loading or unloading."""
        return sum(slot.nbytes for slot in self.slots.values() if slot.counts)

    def ask(self, slot: Slot, *, explicitly: bool = False) -> None:
        """Queues the model for loading. After a failure, this has no effect until RETRY_S have passed.

        explicitly: whether a person asked for the model, and not a request; RETRY_S then does not apply
        """
        if not (explicitly or self.may_be_tried(slot)):
            return
        if slot in self._order or slot.state in ("loading", "loaded"):
            return
        self._order.append(slot)
        if not slot.counts:
            try:
                slot.nbytes = self.size_of(slot.entry)
            except (OSError, ValueError) as error:
                slot.attempts += 1
                self.failed(slot, str(error))

    def may_be_tried(self, slot: Slot) -> bool:
        """Whether a request may cause an attempt to load the model now."""
        return slot.state != "failed" or self.clock() >= slot.failed_at + RETRY_S

    def use(self, used: Iterable[str], wanted: Iterable[str]) -> None:
        """Records which models the requests of all frontends use now (`used`) and wait for (`wanted`)."""
        now, used, wanted = self.clock(), set(used), list(wanted)
        used |= {name for name in wanted if name in self.slots and self.slots[name].state == "loaded"}
        for slot in self.slots.values():
            if slot.used or slot.name in used:
                slot.used_at = now
            slot.used = slot.name in used
        for name in wanted:
            if name in self.slots:
                self.ask(self.slots[name])

    def forget_unwanted(self, wanted: Iterable[str]) -> None:
        """Removes from the queue the models for which no request waits any more."""
        kept = set(wanted)
        for slot in [slot for slot in self._order if slot.name not in kept]:
            self._answered(slot)

    def next_to_load(self) -> Slot | None:
        """Returns the model to load now, which then counts as loading; None if no model waits or memory is lacking."""
        while self._order and not self.asleep:
            slot = self._order[0]
            if slot.state in ("loading", "loaded") or slot.leaving:
                self._answered(slot)
            elif problem := self.never_fits(slot):
                slot.attempts += 1
                self.failed(slot, problem)
            elif slot.state == "unloading" or not self._fits(slot):
                return None
            else:
                self._answered(slot)
                slot.state, slot.reason, slot.attempts = "loading", "", slot.attempts + 1
                slot.began, slot.drains_since = self.clock(), None
                return slot
        return None

    def next_to_unload(self) -> Slot | None:
        """Returns a loaded model to unload now, which then counts as unloading, or None. The model was idle
        for too long, is not in the table any more, or its memory is needed."""
        now = self.clock()
        idle = [slot for slot in self.slots.values() if slot.state == "loaded" and not slot.used]
        found = next(
            (slot for slot in idle if slot.leaving or self.asleep or now >= slot.used_at + slot.keep_alive), None
        )
        waiting = self._order[0] if self._order else None
        if waiting is not self._front:
            self._front, self._waits_since = waiting, now
        if found is None and waiting is not None and not self._fits(waiting, after_unloading=True):
            found = min((slot for slot in idle if not slot.entry.pinned), key=lambda slot: slot.used_at, default=None)
            if found is None and (found := self._after_its_turn(now)) is not None:
                found.drains_since = now
        if found is not None:
            found.state = "unloading"
        return found

    def _after_its_turn(self, now: float) -> Slot | None:
        """Returns the model in use whose turn ended first, if one ended while another model waited; else None."""
        if now < self._waits_since + TURN_S:
            return None
        in_use = (
            slot for slot in self.slots.values() if slot.state == "loaded" and slot.used and not slot.entry.pinned
        )
        ended = (slot for slot in in_use if now >= slot.turn_ends)
        return min(ended, key=lambda slot: slot.turn_ends, default=None)

    def goes_on(self, slot: Slot) -> bool:
        """Says whether a model that is unloading, but that requests use, counts as loaded again."""
        now = self.clock()
        if slot.drains_since is not None:
            if self._order and self._order[0] is not slot and now < slot.drains_since + MOST_DRAIN_S:
                return False
            slot.drains_since, slot.turn_ends = None, now + 2 * MOST_DRAIN_S
        slot.state, slot.announced = "loaded", 0
        return True

    def loaded(self, slot: Slot) -> None:
        now = slot.used_at = self.clock()
        slot.state, slot.turn_ends = "loaded", now + max(TURN_S, now - slot.began)

    def failed(self, slot: Slot, reason: str) -> None:
        slot.state, slot.reason, slot.failed_at = "failed", reason, self.clock()
        self._answered(slot)

    def never_fits(self, slot: Slot) -> str:
        """Returns why the model would not fit even if all unpinned models were unloaded; empty if it would fit."""
        pinned = [other for other in self.slots.values() if other.entry.pinned and other.counts and other is not slot]
        held = sum(other.nbytes for other in pinned)
        if slot.nbytes + held > self.most_bytes:
            beside = f", of which pinned models take {held / GIB:.2f} GiB" if held else ""
            return (
                f"it needs {slot.nbytes / GIB:.2f} GiB, and all models together may take "
                f"{self.most_bytes / GIB:.2f} GiB{beside} (--memory-gb)"
            )
        if len(pinned) >= self.most_models:
            return f"{len(pinned)} pinned models are loaded, and not more may be (--max-loaded-models)"
        return ""

    def _fits(self, slot: Slot, *, after_unloading: bool = False) -> bool:
        others = [other for other in self.slots.values() if other.counts and other is not slot]
        if after_unloading:
            others = [other for other in others if other.state != "unloading"]
        enough = slot.nbytes + sum(other.nbytes for other in others) <= self.most_bytes
        return enough and len(others) < self.most_models

    def _answered(self, slot: Slot) -> None:
        if slot in self._order:
            self._order.remove(slot)


# Makes the table of models from the settings, and the settings of each model's worker. Starts no process.

FREE_SHARE = 0.9  # without --memory-gb, models may take this share of the free memory
FRONTEND_SETTINGS = (
    "chat_template", "tool_format", "reasoning_format", "sampling_defaults", "special_tokens_in_content",
)  # fmt: skip
OF_THE_SERVER = (
    "model", "served_model_name", "lora_modules", "allow_runtime_lora", "worker_metrics_port", "worker_host",
    "kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_pod",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """The table of models, and the settings that they share.

    settings: the settings of the server
    explicit: names of the settings that the user gave
    entries: in the order of the table; their flags are converted to values of settings, by name
    most_bytes: memory that all loaded models may take together
    keep_alive: seconds that a model stays loaded without requests; infinity: until memory is needed
    hub: finds the models that were fetched from the hub
    pulled: names of the entries that stand in the library, because clients had them fetched
    """

    settings: Settings
    explicit: frozenset[str]
    entries: tuple[Entry, ...]
    most_models: int
    most_bytes: int
    keep_alive: float
    hub: HubModels
    pulled: frozenset[str] = frozenset()

    def worker_settings(self, entry: Entry) -> Settings:
        """Returns the settings of a model's worker. Translates a GGUF file, which may take seconds.

        Raises CliError for a missing model, and ConfigError for flags that contradict each other.
        """
        shared = self.settings
        values: dict[str, Any] = {
            "kv_cache_gb": self._pool_gb(entry), "worker_metrics_port": 0, "kv_events_endpoint": "",
            "kv_events_replay_endpoint": "", **entry.flags,
            "model": self.hub.path(entry.model), "served_model_name": ",".join(entry.names),
            "run_dir": str(worker_folder(shared.wire.run_dir, entry.name)), "models": "", "models_dir": "",
            "allow_pull": False,
        }  # fmt: skip
        return with_local_model(check(with_values(shared, values), values.keys() | {"kv_cache_gb"}))

    def for_frontends(self) -> Settings:
        """Returns the settings of the frontends, and writes the table that they read into the run folder."""
        first, file = self.entries[0], self.write()
        names = {"model": first.model, "served_model_name": first.name}
        return with_values(self.settings, {"models": str(file), "models_dir": "", **names})

    def write(self) -> Path:
        """Writes the table for the frontends. A frontend that reads meanwhile gets either the old or the new table."""
        folder = Path(self.settings.wire.run_dir)
        file = folder / "models.json"
        new = file.with_suffix(".new")
        new.write_bytes(encode_entries(self.entries))
        if self.settings.models.allow_pull:
            write_presets(folder, read_library(library_file()).presets)
        return new.replace(file)

    @property
    def own_models(self) -> dict[str, str]:
        """The models that are in the server's own table, not in the library of pulled ones, by their names."""
        own = [entry for entry in self.entries if entry.name not in self.pulled]
        return {name: entry.model for entry in own for name in entry.names}

    def read_again(self) -> "Plan":
        """Reads the file, the folder or the flags that name the models. Raises ConfigError."""
        own = _entries(self.settings)
        pulled = _pulled(self.settings, own)
        entries = tuple(_with_flags(entry) for entry in [*own, *pulled])
        planned = replace(self, entries=entries, pulled=frozenset(entry.name for entry in pulled))
        for entry in planned.entries:
            names = {"model": entry.model, "served_model_name": ",".join(entry.names)}
            values = {**entry.flags, **names, "kv_cache_gb": planned._pool_gb(entry)}
            try:
                check(with_values(self.settings, values), values.keys() | self.explicit)
            except ConfigError as error:
                raise ConfigError(f"the model {entry.name}: {error}") from None
        return planned

    def size_of(self, entry: Entry) -> int:
        """Returns the bytes that the model takes. Raises OSError or ValueError if its files cannot be read."""
        worker = with_values(self.settings, entry.flags).worker
        kept = Kept(worker.dtype, worker.quantization, worker.device == "cpu" or not visible_gpus())
        weights = weights_bytes(_weight_files(self.hub.path(entry.model)), kept)
        return weights + int(self._pool_gb(entry) * GIB) + PROCESS_BYTES

    def _pool_gb(self, entry: Entry) -> float:
        given = float(entry.flags.get("kv_cache_gb", 0.0)) or self.settings.worker.kv_cache_gb
        return given or round(CPU_SHARE * self.most_bytes / self.most_models / GIB, 3)


def plan(settings: Settings, explicit: Collection[str]) -> Plan:
    """Reads the table that the settings name. Raises ConfigError, which names the flag, or the file and the model."""
    ours = settings.models
    flags = "--models or --models-dir" if ours.has_table else _why_many(settings)
    of_one_model = {"lora_modules", "allow_runtime_lora"} | (
        {"model", "served_model_name"} if ours.has_table else set()
    )
    if given := sorted(of_one_model & {*explicit}):
        raise ConfigError(f"{flag_name(given[0])} cannot be combined with {flags}")
    if settings.launch.workers != 1 or settings.frontend.worker_addresses or settings.frontend.workers_file:
        raise ConfigError("a server with many models needs --workers 1, and no workers started elsewhere")
    if settings.wire.request_address or settings.wire.event_address:
        raise ConfigError("a server with many models needs workers under --run-dir, without --request-address")
    try:
        check_socket_path(f"ipc://{worker_folder(settings.wire.run_dir, '')}/requests.sock")
    except ValueError as error:
        raise ConfigError(
            f"--run-dir {settings.wire.run_dir} is too long for the sockets of many models: {error}"
        ) from None
    most = ours.max_loaded_models
    if settings.worker.device != "cpu" and visible_gpus():
        if most > 1 and "max_loaded_models" in explicit:
            raise ConfigError("--max-loaded-models must be 1 on a GPU: a worker takes its share of the whole device")
        most = 1
    try:
        keep_alive = seconds_of(ours.keep_alive)
    except ValueError as error:
        raise ConfigError(f"--keep-alive {error}") from None
    nbytes = int(ours.memory_gb * GIB) or int(FREE_SHARE * available_bytes())
    return Plan(
        settings, frozenset(explicit), (), most, nbytes, keep_alive, HubModels(settings.model.revision)
    ).read_again()


def _entries(settings: Settings) -> list[Entry]:
    """Returns the models that the settings name. Raises ConfigError."""
    ours = settings.models
    if not ours.has_table:
        return _from_flags(settings.model)
    entries = read_entries(Path(ours.models).expanduser()) if ours.models else []
    found = find_entries(Path(ours.models_dir).expanduser()) if ours.models_dir else []
    return entries + [entry for entry in found if not any(entry.name in one.names for one in entries)]


def _why_many(settings: Settings) -> str:
    return "several --model" if settings.model.several else "--allow-pull"


def _pulled(settings: Settings, own: Sequence[Entry]) -> list[Entry]:
    """Returns the entries of the library, without those whose name an entry of the table has. Raises ConfigError."""
    if not settings.models.allow_pull:
        return []
    taken = {name for entry in own for name in entry.names}
    return [entry for entry in read_library(library_file()).entries if entry.name not in taken]


def _from_flags(config: ModelConfig) -> list[Entry]:
    models, given = config.several, config.served_model_name
    if not models:  # one model and --allow-pull
        name, *aliases = config.names if given else (short_name(config.model), config.model)
        others = tuple(other for other in dict.fromkeys(aliases) if other != name)
        return checked([Entry(config.model, name=name, aliases=others, preload=True)], "--model")
    names = config.names if given else tuple(map(short_name, models))
    if len(names) != len(models):
        raise ConfigError(
            f"--served-model-name has {len(names)} different names for {len(models)} models: give each a name, or none"
        )
    entries = [Entry(model, name=name) for model, name in zip(models, names, strict=True)]
    return checked(entries, "--model" if not given else "--served-model-name")


def _with_flags(entry: Entry) -> Entry:
    """Returns the entry with its flags as values of settings. Raises ConfigError, which names model and flag."""
    flags = {flag.name: flag for flag in all_flags() if _is_of_a_model(flag)}
    values = {}
    for written, value in entry.flags.items():
        name = written.removeprefix("--").replace("-", "_")
        if name not in flags:
            raise ConfigError(f"the model {entry.name}: {written!r} is not a flag that one model can have")
        values[name] = flags[name].value(str(value), f"the model {entry.name}: {flags[name].option}")
    return msgspec.structs.replace(entry, flags=values)


def _is_of_a_model(flag: Flag) -> bool:
    own = flag.record in ("model", "worker") and flag.name not in OF_THE_SERVER
    return own or flag.name in FRONTEND_SETTINGS


def _weight_files(model: str) -> list[Path]:
    """Returns a model's weight files. Raises FileNotFoundError if `model` is no checkpoint folder and no GGUF file."""
    if model == SMOLLM2.name:
        return []
    path = DEMO_MODEL if model == DEMO else Path(model).expanduser()
    files = local_model(path)
    if files is None and is_translation(path):
        files = [path / file for file in read_index(path).files]
    if files is None:
        files = weight_files(path) if (path / "config.json").is_file() else []
    if not files:
        raise FileNotFoundError(
            f"{model} is no checkpoint folder and no GGUF file on this machine; `sluice fetch` gets models from the hub"
        )
    return files
