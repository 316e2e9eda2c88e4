"""Makes the table of models from the settings, and the settings of each model's worker. Starts no process."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from deploy.supervisor.child_command import DEMO, DEMO_MODEL, with_local_model
from deploy.supervisor.models.hub import HubModels
from deploy.supervisor.models.sizes import GIB, PROCESS_BYTES, Kept, weight_files, weights_bytes
from deploy.supervisor.packaged_model import SMOLLM2
from shared.config import ConfigError, ModelConfig, Settings, flag_name, with_values
from shared.flags import Flag, all_flags
from shared.gguf.index import read_index
from shared.gguf.naming import local_model, short_name
from shared.gguf.translated import is_translation
from shared.machine import CPU_SHARE, available_bytes, visible_gpus
from shared.models.durations import seconds_of
from shared.models.entries import Entry, checked, encode_entries, find_entries, read_entries, worker_folder
from shared.settings_check import check
from shared.wire.address import check_socket_path

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
    """

    settings: Settings
    explicit: frozenset[str]
    entries: tuple[Entry, ...]
    most_models: int
    most_bytes: int
    keep_alive: float
    hub: HubModels

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
        }  # fmt: skip
        return with_local_model(check(with_values(shared, values), values.keys() | {"kv_cache_gb"}))

    def for_frontends(self) -> Settings:
        """Returns the settings of the frontends, and writes the table that they read into the run folder."""
        first, file = self.entries[0], self.write()
        names = {"model": first.model, "served_model_name": first.name}
        return with_values(self.settings, {"models": str(file), "models_dir": "", **names})

    def write(self) -> Path:
        """Writes the table for the frontends. A frontend that reads meanwhile gets either the old or the new table."""
        file = Path(self.settings.wire.run_dir) / "models.json"
        new = file.with_suffix(".new")
        new.write_bytes(encode_entries(self.entries))
        return new.replace(file)

    def read_again(self) -> "Plan":
        """Reads the file, the folder or the flags that name the models. Raises ConfigError."""
        planned = replace(self, entries=tuple(_with_flags(entry) for entry in _entries(self.settings)))
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
    flags = "--models or --models-dir" if ours.has_table else "several --model"
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


def _from_flags(config: ModelConfig) -> list[Entry]:
    models, given = config.several, config.served_model_name
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
