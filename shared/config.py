"""Every setting, its meaning, unit and default: frozen records, read once from flags and environment.

A field `prefill_chunk_size` is the flag `--prefill-chunk-size` and the variable `SLUICE_PREFILL_CHUNK_SIZE`
(flags win); booleans get `--x / --no-x`. `at_least`, `above` and `at_most` bound one setting; rules.py has every rule
that spans two. See flags.py for the reading.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BY_DEVICE = 0  # default of what the worker finds for its device, see sizes.py; nobody can ask for it


class ConfigError(ValueError):
    """One sentence naming the flags that do not fit; the command prints it and exits with 2."""


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    shown: str = "",
) -> Any:
    """`shown`: the default in words, where it stands for one that is found later."""
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    return field(default=default, metadata={"help": help, "unit": unit, "choices": choices, "shown": shown, **bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is served; read by frontend and worker alike, which must agree."""

    model: str = setting("demo", "what to serve: demo (embedded), a Hugging Face hub id, or a checkpoint folder")
    revision: str = setting("", "branch, tag or commit of a hub id; empty: the newest of its main branch")
    served_model_name: str = setting("", "the name clients use; empty: the value of --model")
    max_seq_len: int = setting(
        0, "most tokens of one sequence, prompt and output; 0: what the model was made for and the K/V pool can hold",
        unit="tokens", at_least=0,
    )  # fmt: skip

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """Where worker and frontends meet: ipc://PATH on one host, tcp://HOST:PORT across hosts."""

    request_address: str = setting("", "address of the worker's request socket; empty: under --run-dir")
    event_address: str = setting("", "address of the worker's event socket; empty: under --run-dir")
    run_dir: str = setting("", "folder (mode 0700) for sockets; empty: one of its own for this server")
    curve_dir: str = setting("", "folder with CURVE keys for tcp:// addresses")
    insecure: bool = setting(False, "allow tcp:// addresses without CURVE keys")

    @property
    def requests(self) -> str:
        return self.request_address or f"ipc://{self.run_dir}/requests.sock"

    @property
    def events(self) -> str:
        return self.event_address or f"ipc://{self.run_dir}/events.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker: device, memory, scheduling."""

    device: str = setting("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "number format of weights and K/V; auto: the checkpoint's, but float32 for float16 on the CPU",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    kv_cache_dtype: str = setting(
        "auto", "number format of K/V; auto: the model's; fp8: eight bits each, so that twice as many tokens fit",
        choices=("auto", "fp8"),
    )  # fmt: skip
    quantization: str = setting(
        "auto",
        "weights of eight bits in the layers, with a scale a row; auto: what the checkpoint says; fp8, int8: quantized "
        "while loading; fp8-dynamic, int8-dynamic: activations, too, with a scale a token; none: a quantized "
        "checkpoint is widened. On the CPU weights are widened in any case, and activations stay as they are",
        choices=("auto", "none", "fp8", "int8", "fp8-dynamic", "int8-dynamic"),
    )
    threads: int = setting(0, "compute threads on the CPU; 0: one a core", unit="threads", at_least=0, at_most=1024)
    kv_cache_gb: float = setting(0.0, "size of the K/V pool; 0: from free memory", unit="GiB", at_least=0)
    gpu_memory_utilization: float = setting(
        0.9, "share of the GPU's memory that weights, K/V and scratch may take", above=0, at_most=1
    )
    batching_mode: str = setting(
        "continuous", "continuous: join and leave at every step; static: a batch forms, runs to its end, then the next",
        choices=("continuous", "static"),
    )  # fmt: skip
    batch_wait_timeout_s: float = setting(
        0.05, "static batching: longest wait for a batch to fill", unit="seconds", at_least=0
    )
    scheduler_policy: str = setting(
        "fcfs", "fcfs: decodes first, prompts in order of arrival; prefill_first: prompts before decodes; "
        "decode_round_robin: decodes and prompts take turns when the step is full",
        choices=("fcfs", "prefill_first", "decode_round_robin"),
    )  # fmt: skip
    use_chunked_prefill: bool = setting(True, "cut long prompts into chunks that share steps with decodes")
    prefill_chunk_size: int = setting(
        BY_DEVICE, "most tokens of one prompt in one step", unit="tokens", at_least=1, shown="512, on a GPU 2048"
    )
    max_prefill_chunks_per_step: int = setting(
        0, "most prompts that advance in one step; 0: no limit", unit="prompts", at_least=0
    )
    max_step_tokens: int = setting(
        BY_DEVICE, "token budget of one step", unit="tokens", at_least=1, shown="512, on a GPU 2048"
    )
    target_step_s: float = setting(
        0.15, "how long a step shall last in which something decodes: only so many prompt tokens share it, by the "
        "measure of steps before, but 64 at least, and what is worth reading the weights; 0: up to --max-step-tokens",
        unit="seconds", at_least=0,
    )  # fmt: skip
    max_batch_size: int = setting(
        BY_DEVICE, "most sequences in one step", unit="sequences", at_least=1, shown="64, on a GPU 256"
    )
    max_waiting_requests: int = setting(
        1024, "most sequences waiting; beyond it the answer is 503. With API keys a name may have seven times as many "
        "waiting as it leaves free, so one alone fills 7/8 and the next one finds a place",
        unit="sequences", at_least=1,
    )  # fmt: skip
    max_waiting_tokens: int = setting(0, "most prompt tokens waiting; 0: no limit", unit="tokens", at_least=0)
    kv_cache_backend: str = setting(
        "paged", "paged: pages of --page-size tokens; contiguous: one page of --max-seq-len tokens a sequence",
        choices=("paged", "contiguous"),
    )  # fmt: skip
    page_size: int = setting(32, "tokens in a page", unit="tokens", at_least=1)
    prefix_cache: bool = setting(True, "share the K/V of equal prompt beginnings")
    batch_invariant: bool = setting(True, "the same bits for a request whatever shares its steps")
    cuda_graphs: bool = setting(True, "on a GPU, record decodes once and replay them")
    kernels: str = setting(
        "auto",
        "what computes on a GPU; auto: Triton's kernels, once a few steps have shown that they compute on this device "
        "what plain PyTorch does, else plain PyTorch; triton: without looking; torch: plain PyTorch, which is slower, "
        "and bits may depend on who shares a step",
        choices=("auto", "triton", "torch"),
    )
    overlap: bool = setting(True, "on a GPU, launch the next step before the ids of the last one are read")
    speculation: str = setting(
        "auto", "ngram: guess tokens from what followed the same ones before, and compute several in a step; kept is "
        "only what would have come anyway, so answers are the same; auto: on the CPU, for models of 64 MiB and more; "
        "off: never",
        choices=("auto", "ngram", "off"),
    )  # fmt: skip
    max_draft_tokens: int = setting(
        7, "most tokens guessed for one sequence in a step, in which there are 16 at most in all", unit="tokens",
        at_least=1, at_most=15,
    )  # fmt: skip
    seed: int = setting(
        -1, "draws the seeds of requests that bring none; -1: from the system's entropy", at_least=-1, at_most=2**64 - 1
    )
    drain_timeout: float = setting(30.0, "on SIGTERM, how long running streams may go on", unit="seconds", at_least=0)
    lease_timeout: float = setting(10.0, "a frontend silent this long loses its requests", unit="seconds", above=0)
    canary_interval: float = setting(
        10.0, "an idle worker computes one token for nobody this often, to know that it still can; 0: never",
        unit="seconds", at_least=0,
    )  # fmt: skip
    worker_metrics_port: int = setting(8001, "the worker's own /metrics; 0: none", at_least=0, at_most=65535)
    worker_host: str = setting("127.0.0.1", "where the worker's /metrics listens")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """One frontend: HTTP and text."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", at_least=0, at_most=65535)
    completions_stream_format: str = setting(
        "openai", "what /v1/completions speaks when the body does not say", choices=("openai", "events")
    )  # fmt: skip
    chat_template: str = setting("", "file with a chat template (Jinja) to use instead of the model's own")
    sampling_defaults: str = setting(
        "openai", "where a request does not say how to sample; openai: temperature 1, all tokens; model: as the "
        "checkpoint's generation_config.json recommends (temperature, top_p, top_k, min_p, repetition_penalty)",
        choices=("openai", "model"),
    )  # fmt: skip
    tool_format: str = setting(
        "auto", "how the model writes a call of a function; auto: told from its chat template",
        choices=("auto", "hermes", "llama", "mistral", "none"),
    )  # fmt: skip
    reasoning_format: str = setting(
        "auto", "how the model marks what it thinks; auto: told from its chat template",
        choices=("auto", "think", "none"),
    )  # fmt: skip
    max_body_bytes: int = setting(8 << 20, "largest request body", unit="bytes", at_least=1)
    api_keys: str = setting("", "file with an API key and, if it has one, its name a line; empty: no key needed")
    keepalive_s: float = setting(15.0, "a comment line after this much silence on a stream", unit="seconds", above=0)
    stall_timeout: float = setting(
        30.0, "a process that gives no sign of life for this long hangs: not ready, and started again by `serve`; "
        "a long step gives one a layer", unit="seconds", above=0,
    )  # fmt: skip
    recovery_timeout: float = setting(
        120.0, "how long streams wait for a lost worker to come back", unit="seconds", at_least=0
    )
    access_log: str = setting(
        "text", "a line a request when it has ended; text: for people, beside the other lines if --log-level is info, "
        "and none for looking after the server; json: an object each, on stdout",
        choices=("off", "text", "json"),
    )  # fmt: skip
    otlp_endpoint: str = setting(
        "",
        "where traces go, an OpenTelemetry collector as http://HOST:4318; empty: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    worker_addresses: str = setting(
        "", "workers started elsewhere, between commas: tcp://HOST:PORT (requests; events on the next port) or "
        "ipc:///FOLDER (its --run-dir); a host's name stands for all its addresses",
    )  # fmt: skip
    workers_file: str = setting("", "file with one such address a line; read again when it changes")
    metrics_prefix: str = setting("sluice_", "first part of every metric's name")
    ssl_certfile: str = setting("", "certificate chain (PEM) for https://; empty: http://")
    ssl_keyfile: str = setting("", "private key (PEM) of --ssl-certfile; empty: it is in the same file")
    max_connections: int = setting(
        10_000, "most connections to one frontend; beyond it the answer is 503", unit="connections", at_least=1
    )
    max_header_bytes: int = setting(64 << 10, "largest request line and headers", unit="bytes", at_least=1024)
    request_timeout: float = setting(
        60.0, "a request whose headers and body take longer to arrive is refused with 408", unit="seconds", above=0
    )
    write_timeout: float = setting(
        60.0, "a client that takes nothing of its answer this long is cut off", unit="seconds", above=0
    )
    idle_timeout: float = setting(
        75.0, "a connection on which no request begins this long is closed", unit="seconds", above=0
    )
    log_level: str = setting("info", "least severe log line", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """The supervisor: which processes, and how patient."""

    frontends: int = setting(1, "frontend processes that share the port", unit="processes", at_least=1)
    workers: int = setting(
        1, "worker processes, each with the whole model: one a GPU; on the CPU they share out --threads; "
        "0: only those of --worker-addresses or --workers-file", unit="processes", at_least=0,
    )  # fmt: skip
    stop_timeout: float = setting(40.0, "after SIGTERM, how long before children are killed", unit="seconds", above=0)
    load_timeout: float = setting(
        600.0, "a process that is loading and does not move for this long, nor say a word, is started again",
        unit="seconds", above=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All records of one command; a command uses those it needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


# How settings are addressed by name: no two records have a field of the same name.


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """The same settings with some of them changed; `values` maps names such as `page_size` to values.

    Raises ConfigError for a name that no record has; values are not checked, see `check`.
    """
    if unknown := values.keys() - _flat(settings).keys():
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}")
    changed = {}
    for record in dataclasses.fields(Settings):
        old = getattr(settings, record.name)
        own = {item.name: values[item.name] for item in dataclasses.fields(old) if item.name in values}
        changed[record.name] = dataclasses.replace(old, **own)
    return Settings(**changed)


def non_default_names(settings: Settings) -> frozenset[str]:
    """The settings whose value is not the default."""
    flat, plain = _flat(settings), _flat(Settings())
    return frozenset(name for name in flat if flat[name] != plain[name])


def value_problem(item: "dataclasses.Field[Any]", value: Any) -> str:
    """What is wrong with a value of the right type ("must be at least 1"); empty: nothing."""
    meta = item.metadata
    if meta["choices"] and value not in meta["choices"]:
        return f"must be one of {', '.join(meta['choices'])}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if meta["at_least"] is not None and value < meta["at_least"]:
        return f"must be at least {meta['at_least']}"
    if meta["above"] is not None and value <= meta["above"]:
        return f"must be above {meta['above']}"
    if meta["at_most"] is not None and value > meta["at_most"]:
        return f"must be at most {meta['at_most']}"
    return ""


def _flat(settings: Settings) -> dict[str, Any]:
    return {
        item.name: getattr(getattr(settings, record.name), item.name)
        for record in dataclasses.fields(settings)
        for item in dataclasses.fields(getattr(settings, record.name))
    }
