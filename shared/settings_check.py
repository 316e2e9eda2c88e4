"""What settings must be, each by itself and one beside the other; and which defaults give way to what was asked for."""

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from shared.address import parse_all
from shared.config import (
    ConfigError,
    Settings,
    WireConfig,
    flag_name,
    non_default_names,
    value_problem,
    with_values,
)


def check(settings: Settings, asked: Collection[str] | None = None) -> Settings:
    """The settings as they will be used, or `ConfigError`.

    `asked` names the settings that somebody gave (None: those that differ from their default). What was asked
    for wins over a default that does not fit it, and two things asked for that contradict each other are an error.
    """
    asked = non_default_names(settings) if asked is None else asked
    _check_values(settings)
    _check_wire(settings.wire)
    _check_workers(settings)
    for rule in (_static, _contiguous, _chunks, _target, _budget, _speculation, _stopping, _ports):
        settings = with_values(settings, rule(settings, asked))
    return settings


def _check_values(settings: Settings) -> None:
    for record in dataclasses.fields(settings):
        values = getattr(settings, record.name)
        for item in dataclasses.fields(values):
            value = getattr(values, item.name)
            problem = "" if value == item.default else value_problem(item, value)
            if problem:
                raise ConfigError(f"{flag_name(item.name)} {problem}, not {getattr(values, item.name)!r}")
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", settings.frontend.metrics_prefix):
        raise ConfigError("--metrics-prefix may hold letters, digits, _ and :, and may not begin with a digit")
    if not settings.model.model:
        raise ConfigError("--model must not be empty")
    if any("\ud800" <= letter <= "\udfff" for letter in settings.model.name):  # bytes that are no text
        raise ConfigError("--served-model-name must be UTF-8: it is what clients call the model")


def _check_wire(wire: WireConfig) -> None:
    given = [address for address in (wire.request_address, wire.event_address) if address]
    for address in given:
        if not re.match(r"(ipc|tcp)://.", address):
            raise ConfigError(f"--request-address and --event-address begin with ipc:// or tcp://, unlike {address!r}")
    remote = [address for address in given if address.startswith("tcp://")]
    if len(remote) == 1:
        raise ConfigError("--request-address and --event-address must both be tcp:// or both be ipc://")
    if remote and not wire.curve_dir and not wire.insecure:
        raise ConfigError("tcp:// in --request-address and --event-address needs keys in --curve-dir, or --insecure")


def _check_workers(settings: Settings) -> None:
    wire, frontend, count = settings.wire, settings.frontend, settings.launch.workers
    try:
        elsewhere = parse_all(frontend.worker_addresses)
    except ValueError as error:
        raise ConfigError(f"--worker-addresses: {error}") from None
    if any(one.name.startswith("tcp://") for one in elsewhere) and not wire.curve_dir and not wire.insecure:
        raise ConfigError("tcp:// in --worker-addresses needs keys in --curve-dir, or --insecure")
    several = bool(elsewhere or frontend.workers_file)
    if wire.request_address and (several or count != 1):
        other = "--workers" if count != 1 else "--worker-addresses" if elsewhere else "--workers-file"
        raise ConfigError(f"--request-address is for a single worker; it does not go with {other}")
    if not count and not several:
        raise ConfigError("--workers 0 needs workers elsewhere: --worker-addresses or --workers-file")


def _static(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    if settings.worker.batching_mode != "static":
        return {}
    if settings.worker.use_chunked_prefill and "use_chunked_prefill" in asked:
        raise ConfigError("--use-chunked-prefill needs --batching-mode continuous, not static")
    return {"use_chunked_prefill": False}


def _contiguous(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    if settings.worker.kv_cache_backend != "contiguous":
        return {}
    if settings.worker.prefix_cache and "prefix_cache" in asked:
        raise ConfigError("--prefix-cache needs --kv-cache-backend paged, not contiguous")
    if "page_size" in asked:
        raise ConfigError("--page-size needs --kv-cache-backend paged: contiguous has one page a sequence")
    return {"prefix_cache": False}


def _chunks(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    worker = settings.worker
    if worker.max_prefill_chunks_per_step and not worker.use_chunked_prefill:
        cause = "--batching-mode static" if worker.batching_mode == "static" else "--no-use-chunked-prefill"
        raise ConfigError(f"--max-prefill-chunks-per-step has no meaning with {cause}")
    return {}


def _target(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    """Only prompts that are cut, and do not go before decodes, can make room in a step."""
    worker = settings.worker
    if worker.scheduler_policy == "prefill_first":
        cause = "--scheduler-policy prefill_first"
    elif not worker.use_chunked_prefill:
        cause = "--batching-mode static" if worker.batching_mode == "static" else "--no-use-chunked-prefill"
    else:
        return {}
    if worker.target_step_s and "target_step_s" in asked:
        raise ConfigError(f"--target-step-s has no meaning with {cause}")
    return {"target_step_s": 0.0}


def _budget(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    """One step can hold a chunk, and a decode of every running sequence."""
    worker = settings.worker
    sizes = {"max_batch_size": worker.max_batch_size}
    if worker.use_chunked_prefill:
        sizes["prefill_chunk_size"] = worker.prefill_chunk_size
    for name, size in sizes.items():
        if size > worker.max_step_tokens > 0:
            raise ConfigError(f"{flag_name(name)} {size} must not exceed --max-step-tokens {worker.max_step_tokens}")
    return {}


def _speculation(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    """What is guessed follows a token that is known, and is computed in company."""
    worker = settings.worker
    if worker.speculation == "off" and "max_draft_tokens" in asked:
        raise ConfigError("--max-draft-tokens has no meaning with --speculation off")
    if worker.speculation != "ngram":
        return {}
    if not worker.batch_invariant:
        raise ConfigError("--speculation ngram needs --batch-invariant: else answers would not be the same")
    if worker.overlap and "overlap" in asked:
        raise ConfigError("--speculation ngram needs --no-overlap: it guesses what follows an id that is read")
    return {"overlap": False}


def _stopping(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    """Children are killed only after they had their time to drain."""
    drain, stop = settings.worker.drain_timeout, settings.launch.stop_timeout
    if stop > drain:
        return {}
    if "stop_timeout" in asked and "drain_timeout" in asked:
        raise ConfigError(f"--stop-timeout {stop:g} must be longer than --drain-timeout {drain:g}")
    return {"drain_timeout": stop * 0.75} if "stop_timeout" in asked else {"stop_timeout": drain + 10.0}


def _ports(settings: Settings, asked: Collection[str]) -> dict[str, Any]:
    port, metrics = settings.frontend.port, settings.worker.worker_metrics_port
    if port != metrics or not port:
        return {}
    if "worker_metrics_port" in asked:
        raise ConfigError(f"--port and --worker-metrics-port are both {port}")
    return {"worker_metrics_port": port + 1 if port < 65535 else 0}
