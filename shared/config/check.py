"""Checks settings, each by itself and in combination, and adapts defaults to explicit settings.

An explicit setting wins over a default that does not fit it; two explicit settings that contradict each other are an
error.
"""

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from shared.address import check_socket_path, parse_all, with_port_offset
from shared.config.declaration import ConfigError, flag_name, value_problem, words
from shared.config.frontend import ALIASES, FrontendConfig
from shared.config.settings import Settings, WireConfig, non_default_names, read_speculative_config, with_values


def check(settings: Settings, explicit: Collection[str] | None = None) -> Settings:
    """Returns the settings as they will be used. Raises ConfigError.

    explicit: names of the settings that the user gave; if None, those that differ from their default.
    """
    explicit = non_default_names(settings) if explicit is None else explicit
    _check_values(settings)
    _check_wire(settings.wire)
    _check_workers(settings)
    _check_origins(settings.frontend)
    _check_hosts(settings.frontend)
    if settings.frontend.record_text and not settings.frontend.record:
        raise ConfigError("--record-text needs --record FILE")
    if settings.frontend.objectives and not settings.frontend.gateway_headers:
        raise ConfigError("--objectives has no effect without --gateway-headers")
    if settings.worker.ranks > 1 or settings.worker.rank_group != "local":
        _check_ranks(settings)
    for rule in (
        _static,
        _contiguous,
        _chunks,
        _target,
        _budget,
        _speculation,
        _stopping,
        _ports,
        _kv_events,
        _roles,
        _kv_store,
    ):
        settings = with_values(settings, rule(settings, explicit))
    return settings


def _check_ranks(settings: Settings) -> None:
    """Raises ConfigError for settings that several processes computing one model together do not support."""
    worker = settings.worker
    if worker.rank_group == "local":
        return
    if worker.expert_metrics and worker.pipeline_parallel_size > 1:
        raise ConfigError(
            f"--expert-metrics with --pipeline-parallel-size needs --rank-group local, not {worker.rank_group}: "
            "stages on other hosts do not report their counts"
        )
    if worker.ranks == 1:
        raise ConfigError(
            f"--rank-group {worker.rank_group} needs --tensor-parallel-size or --pipeline-parallel-size: both "
            "multiplied are the number of all processes"
        )
    if settings.launch.workers != 1 or settings.many:
        raise ConfigError(f"--rank-group {worker.rank_group} is for a server with one worker and one model")


def _check_values(settings: Settings) -> None:
    for record in dataclasses.fields(settings):
        values = getattr(settings, record.name)
        for item in dataclasses.fields(values):
            value = getattr(values, item.name)
            problem = "" if value == item.default else value_problem(item, value)
            if problem:
                raise ConfigError(f"{flag_name(item.name)} {problem}, not {getattr(values, item.name)!r}")
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", settings.frontend.metrics_prefix):
        raise ConfigError("--metrics-prefix may contain letters, digits, _ and :, and must not begin with a digit")
    aliases, prefix = settings.frontend.metrics_aliases, settings.frontend.metrics_prefix
    if ALIASES.get(aliases) == prefix:
        raise ConfigError(f"--metrics-aliases {aliases} repeats what --metrics-prefix {prefix} names: give one of them")
    if not settings.model.model:
        raise ConfigError("--model must not be empty")
    if "," in settings.model.model and not (settings.model.served_model_name or settings.many):
        raise ConfigError("--served-model-name must be given, because --model has a comma, which separates names")
    if any("\ud800" <= letter <= "\udfff" for letter in "".join(settings.model.names)):  # surrogates: not UTF-8
        raise ConfigError("--served-model-name must be valid UTF-8: clients send it as the model's name")


def _check_wire(wire: WireConfig) -> None:
    addresses = [address for address in (wire.request_address, wire.event_address) if address]
    for address in addresses:
        if not re.match(r"(ipc|tcp)://.", address):
            raise ConfigError(
                f"--request-address and --event-address must begin with ipc:// or tcp://, not {address!r}"
            )
        try:
            check_socket_path(address)
        except ValueError as error:
            raise ConfigError(f"--request-address and --event-address: {error}") from None
    remote = [address for address in addresses if address.startswith("tcp://")]
    if len(remote) == 1:
        raise ConfigError("--request-address and --event-address must both be tcp:// or both be ipc://")
    if remote and not wire.curve_dir and not wire.insecure:
        raise ConfigError("tcp:// in --request-address and --event-address needs keys in --curve-dir, or --insecure")


def _check_workers(settings: Settings) -> None:
    wire, frontend, count = settings.wire, settings.frontend, settings.launch.processes
    try:
        external = parse_all(frontend.worker_addresses)
    except ValueError as error:
        raise ConfigError(f"--worker-addresses: {error}") from None
    if any(address.name.startswith("tcp://") for address in external) and not wire.curve_dir and not wire.insecure:
        raise ConfigError("tcp:// in --worker-addresses needs keys in --curve-dir, or --insecure")
    has_external = bool(external or frontend.workers_file)
    if wire.request_address and (has_external or count != 1):
        other = "--worker-addresses" if external else "--workers-file"
        if count != 1:
            other = "--prefill-workers" if settings.launch.prefill_workers else "--workers"
        raise ConfigError(f"--request-address is for a single worker and cannot be combined with {other}")
    if not settings.launch.workers and not has_external:
        raise ConfigError("--workers 0 needs workers started elsewhere: --worker-addresses or --workers-file")


def _check_origins(frontend: FrontendConfig) -> None:
    for origin in words(frontend.cors_origins):
        if origin not in ("*", "localhost") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise ConfigError(
                f"--cors-origins must be *, localhost or like https://example.com, without a path, not {origin!r}"
            )


def _check_hosts(frontend: FrontendConfig) -> None:
    for host in words(frontend.allowed_hosts):
        if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host):
            raise ConfigError(
                f"--allowed-hosts must be * or like api.example.com, without scheme and port, not {host!r}"
            )


def _static(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    if settings.worker.batching_mode != "static":
        return {}
    if settings.worker.use_chunked_prefill and "use_chunked_prefill" in explicit:
        raise ConfigError("--use-chunked-prefill needs --batching-mode continuous, not static")
    return {"use_chunked_prefill": False}


def _contiguous(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    if settings.worker.kv_cache_backend != "contiguous":
        return {}
    if settings.worker.prefix_cache and "prefix_cache" in explicit:
        raise ConfigError("--prefix-cache needs --kv-cache-backend paged, not contiguous")
    if "page_size" in explicit:
        raise ConfigError("--page-size needs --kv-cache-backend paged: contiguous has one page per sequence")
    return {"prefix_cache": False}


def _chunks(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    worker = settings.worker
    if worker.max_prefill_chunks_per_step and not worker.use_chunked_prefill:
        cause = "--batching-mode static" if worker.batching_mode == "static" else "--no-use-chunked-prefill"
        raise ConfigError(f"--max-prefill-chunks-per-step has no effect with {cause}")
    return {}


def _target(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Switches --target-step-s off where it has no effect.

    The target limits prefill tokens, so it needs chunked prefill, and a policy that schedules decodes first.
    """
    worker = settings.worker
    if worker.scheduler_policy == "prefill_first":
        cause = "--scheduler-policy prefill_first"
    elif not worker.use_chunked_prefill:
        cause = "--batching-mode static" if worker.batching_mode == "static" else "--no-use-chunked-prefill"
    else:
        return {}
    if worker.target_step_s and "target_step_s" in explicit:
        raise ConfigError(f"--target-step-s has no effect with {cause}")
    return {"target_step_s": 0.0}


def _budget(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Checks that a step can hold a whole chunk, and that it can hold a decode of every running sequence."""
    worker = settings.worker
    sizes = {"max_batch_size": worker.max_batch_size}
    if worker.use_chunked_prefill:
        sizes["prefill_chunk_size"] = worker.prefill_chunk_size
    for name, size in sizes.items():
        if size > worker.max_step_tokens > 0:
            raise ConfigError(f"{flag_name(name)} {size} must not exceed --max-step-tokens {worker.max_step_tokens}")
    return {}


def _speculation(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Switches overlap off for drafting, and checks that answers cannot change.

    Drafts continue the last sampled token, so the token must be read before the next step is planned. They are computed
    in one batch, so kernels must give a row the same bits in every batch.
    """
    worker = settings.worker
    if worker.speculation == "off" and "max_draft_tokens" in explicit:
        raise ConfigError("--max-draft-tokens has no effect with --speculation off")
    stated = _speculative_config(settings, explicit) if worker.speculative_config else {}
    if stated.get("speculation", worker.speculation) != "ngram":
        return {}
    flag = "--speculative-config" if stated else "--speculation ngram"
    if not worker.batch_invariant:
        raise ConfigError(f"{flag} needs --batch-invariant: otherwise answers would change")
    if worker.overlap and "overlap" in explicit:
        raise ConfigError(f"{flag} needs --no-overlap: it drafts from the last token id, which must have been read")
    return {"overlap": False, **stated}


def _speculative_config(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Returns the settings with the values that --speculative-config states."""
    worker = settings.worker
    config = read_speculative_config(worker.speculative_config, worker.max_draft_tokens)
    if worker.speculation == "off":
        raise ConfigError("--speculative-config has no effect with --speculation off")
    if "max_draft_tokens" in explicit and worker.max_draft_tokens != config.drafts:
        raise ConfigError(f"--max-draft-tokens {worker.max_draft_tokens} contradicts --speculative-config")
    return {"speculation": "ngram", "max_draft_tokens": config.drafts}


def _stopping(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Makes --stop-timeout longer than --drain-timeout, so that child processes can drain before they are killed."""
    drain, stop = settings.worker.drain_timeout, settings.launch.stop_timeout
    if stop > drain:
        return {}
    if "stop_timeout" in explicit and "drain_timeout" in explicit:
        raise ConfigError(f"--stop-timeout {stop:g} must be longer than --drain-timeout {drain:g}")
    return {"drain_timeout": stop * 0.75} if "stop_timeout" in explicit else {"stop_timeout": drain + 10.0}


def _kv_events(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Checks that a server that publishes K/V events has a prefix cache, and a port for each socket."""
    worker, last = settings.worker, max(0, settings.launch.processes - 1)
    if worker.kv_events_replay_endpoint and not worker.kv_events_endpoint:
        raise ConfigError("--kv-events-replay-endpoint has no effect without --kv-events-endpoint")
    if worker.kv_events_endpoint and settings.many:
        raise ConfigError("--kv-events-endpoint does not work with --models, --models-dir and several --model")
    if worker.kv_events_endpoint and not worker.prefix_cache:
        raise ConfigError("--kv-events-endpoint needs --prefix-cache: it publishes the pages of the prefix cache")
    if "@" in worker.kv_events_pod:
        raise ConfigError(f"--kv-events-pod {worker.kv_events_pod!r} must not contain @, which divides the topic")
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        if endpoint := getattr(worker, name):
            try:
                with_port_offset(endpoint, last)
            except ValueError as error:
                raise ConfigError(f"{flag_name(name)} {error}") from error
    return {}


def _roles(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Checks that workers with roles can hand prompts over, and has them take these from the store in any case.

    The folder that the launcher makes for --prefill-workers is named later (deploy/launcher/run_dir.py).
    """
    worker, launch = settings.worker, settings.launch
    if not launch.prefill_workers and worker.role == "both":
        return {}
    if launch.prefill_workers and worker.role != "both":
        raise ConfigError(f"--role {worker.role} and --prefill-workers both say what the workers do: give one of them")
    flag = "--prefill-workers" if launch.prefill_workers else f"--role {worker.role}"
    if settings.many:
        raise ConfigError(f"{flag} does not work with --models, --models-dir and several --model")
    if settings.model.task not in ("auto", "generate"):
        raise ConfigError(f"{flag} needs --task generate, not {settings.model.task}: other tasks generate nothing")
    if not worker.prefix_cache or worker.kv_cache_backend != "paged":
        raise ConfigError(f"{flag} needs --prefix-cache: prompts are handed over as its pages")
    if worker.ranks > 1:
        raise ConfigError(
            f"{flag} does not work with {worker.ranks_flag} yet: --kv-store, which hands prompts over, does not"
        )
    if not worker.kv_store and (not launch.prefill_workers or not launch.workers):
        raise ConfigError(f"{flag} needs --kv-store: a folder that the workers of both roles share")
    return {} if "kv_store_fetch" in explicit else {"kv_store_fetch": "always"}


def _kv_store(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    """Checks that a server that keeps K/V has a prefix cache, and one process for each model."""
    worker = settings.worker
    if len({*words(worker.kv_store)}) < len(words(worker.kv_store)):
        raise ConfigError("--kv-store names a folder twice")
    if not worker.kv_tiers:
        if settings.launch.prefill_workers:
            return {}
        if given := [name for name in ("kv_store_gb", "kv_store_fetch") if name in explicit]:
            raise ConfigError(f"{flag_name(given[0])} has no effect without --kv-store")
        return {}
    if not worker.prefix_cache or worker.kv_cache_backend != "paged":
        raise ConfigError("--kv-store needs --prefix-cache: it keeps the pages of the prefix cache")
    if worker.ranks > 1:
        raise ConfigError(
            f"--kv-store does not work with {worker.ranks_flag} yet: each process has only a part of the K/V"
        )
    return {}


def _ports(settings: Settings, explicit: Collection[str]) -> dict[str, Any]:
    port, metrics = settings.frontend.port, settings.worker.worker_metrics_port
    if port != metrics or not port:
        return {}
    if "worker_metrics_port" in explicit:
        raise ConfigError(f"--port and --worker-metrics-port are both {port}")
    return {"worker_metrics_port": port + 1 if port < 65535 else 0}
