"""The rules between settings."""

from typing import Any

import pytest

from shared.config.check import check
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values
from tests.shared.harness import parse, refuse


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        ("--batching-mode static --use-chunked-prefill", ("--use-chunked-prefill", "--batching-mode")),
        ("--kv-cache-backend contiguous --prefix-cache", ("--prefix-cache", "--kv-cache-backend")),
        ("--kv-cache-backend contiguous --page-size 16", ("--page-size", "--kv-cache-backend")),
        (
            "--no-use-chunked-prefill --max-prefill-chunks-per-step 2",
            ("--max-prefill-chunks-per-step", "--no-use-chunked-prefill"),
        ),
        (
            "--batching-mode static --max-prefill-chunks-per-step 2",
            ("--max-prefill-chunks-per-step", "--batching-mode"),
        ),
        ("--no-use-chunked-prefill --target-step-s 0.1", ("--target-step-s", "--no-use-chunked-prefill")),
        ("--batching-mode static --target-step-s 0.1", ("--target-step-s", "--batching-mode")),
        ("--scheduler-policy prefill_first --target-step-s 0.1", ("--target-step-s", "--scheduler-policy")),
        ("--rank-group lws", ("--rank-group lws", "--tensor-parallel-size")),
        ("--rank-group lws --tensor-parallel-size 2 --workers 2", ("--rank-group lws", "one worker")),
        ("--pipeline-parallel-size 2 --expert-metrics --rank-group lws", ("--expert-metrics", "--rank-group local")),
        ("--prefill-chunk-size 600 --max-step-tokens 512", ("--prefill-chunk-size", "--max-step-tokens")),
        ("--max-batch-size 64 --max-step-tokens 32", ("--max-batch-size", "--max-step-tokens")),
        ("--speculation off --max-draft-tokens 3", ("--max-draft-tokens", "--speculation off")),
        ("--speculation ngram --no-batch-invariant", ("--speculation ngram", "--batch-invariant")),
        ("--speculation ngram --overlap", ("--speculation ngram", "--no-overlap")),
        ("--stop-timeout 5 --drain-timeout 5", ("--stop-timeout", "--drain-timeout")),
        ("--kv-events-replay-endpoint tcp://*:1", ("--kv-events-replay-endpoint", "--kv-events-endpoint")),
        ("--kv-events-endpoint tcp://*:1 --no-prefix-cache", ("--kv-events-endpoint", "--prefix-cache")),
        ("--kv-events-endpoint tcp://*:1 --models f", ("--kv-events-endpoint", "--models")),
        ("--kv-events-endpoint udp://*:1", ("--kv-events-endpoint", "tcp://HOST:PORT")),
        ("--kv-events-endpoint tcp://*:65535 --workers 2", ("--kv-events-endpoint", "65535", "2 workers")),
        ("--kv-events-endpoint tcp://*:1 --kv-events-pod a@b", ("--kv-events-pod", "@")),
        ("--kv-events-endpoint tcp://*:65535 --prefill-workers 1", ("--kv-events-endpoint", "65535")),
        ("--role prefill", ("--role prefill", "--kv-store")),
        ("--role decode --prefill-workers 1", ("--role decode", "--prefill-workers")),
        ("--role decode --kv-store d --models f", ("--role decode", "--models")),
        ("--role decode --kv-store d --task embed", ("--role decode", "--task generate", "embed")),
        ("--prefill-workers 1 --no-prefix-cache", ("--prefill-workers", "--prefix-cache")),
        ("--prefill-workers 1 --kv-cache-backend contiguous", ("--prefill-workers", "--prefix-cache")),
        ("--prefill-workers 1 --tensor-parallel-size 2", ("--prefill-workers", "--tensor-parallel-size")),
        ("--prefill-workers 1 --workers 0", ("--workers 0", "--worker-addresses")),
        ("--prefill-workers 1 --workers 0 --workers-file f", ("--prefill-workers", "--kv-store")),
        ("--prefill-workers 1 --kv-store-gb x", ("--kv-store-gb",)),
        (
            "--prefill-workers 1 --insecure --request-address tcp://h:1 --event-address tcp://h:2",
            ("--request-address", "--prefill-workers"),
        ),
        ("--port 9000 --worker-metrics-port 9000", ("--port", "--worker-metrics-port")),
        ("--request-address tcp://h:1 --event-address ipc:///e", ("--request-address", "--event-address")),
        ("--request-address tcp://h:1 --event-address tcp://h:2", ("--request-address", "--curve-dir", "--insecure")),
        ("--request-address udp://h:1", ("--request-address", "--event-address")),
    ],
)
def test_contradicting_settings_are_refused_by_name(argv: str, flags: tuple[str, ...]) -> None:
    sentence = refuse(*argv.split())
    assert all(flag in sentence for flag in flags)


def test_variable_counts_as_an_explicit_setting() -> None:
    assert "--use-chunked-prefill" in refuse("--batching-mode", "static", SLUICE_USE_CHUNKED_PREFILL="1")
    assert "--page-size" in refuse("--kv-cache-backend", "contiguous", SLUICE_PAGE_SIZE="16")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--batching-mode static", {"use_chunked_prefill": False, "target_step_s": 0.0}),
        ("--scheduler-policy prefill_first", {"target_step_s": 0.0}),
        ("--kv-cache-backend contiguous", {"prefix_cache": False}),
        ("--kv-cache-backend contiguous --no-prefix-cache", {"prefix_cache": False}),
        ("--speculation ngram", {"overlap": False}),
        ("--speculation off --no-batch-invariant", {"overlap": True}),
        ("--max-draft-tokens 3", {"overlap": True, "speculation": "auto"}),
        ("--port 8001", {"worker_metrics_port": 8002}),
        ("--worker-metrics-port 0 --port 0", {"worker_metrics_port": 0}),
    ],
)
def test_default_gives_way_to_an_explicit_setting(argv: str, expected: dict[str, Any]) -> None:
    worker = parse(*argv.split()).worker
    assert {name: getattr(worker, name) for name in expected} == expected


def test_workers_with_roles_take_prompts_from_the_store_in_any_case() -> None:
    for argv in ("--role decode --kv-store d", "--role prefill --kv-store d", "--prefill-workers 2"):
        settings = parse(*argv.split())
        assert settings.worker.kv_store_fetch == "always" and check(settings) == settings
    assert parse("--prefill-workers", "1", "--kv-store-fetch", "auto").worker.kv_store_fetch == "auto"
    assert parse("--kv-store", "d").worker.kv_store_fetch == "auto"
    assert parse("--prefill-workers", "1", "--kv-store-gb", "4").worker.kv_store == ""  # the launcher makes the folder


def test_stop_timeout_exceeds_drain_timeout() -> None:
    assert parse("--drain-timeout", "100").launch.stop_timeout > 100
    assert parse("--stop-timeout", "8").worker.drain_timeout < 8


def test_tcp_addresses_need_keys_or_insecure() -> None:
    remote = ("--request-address", "tcp://h:1", "--event-address", "tcp://h:2")
    assert parse(*remote, "--curve-dir", "keys").wire.requests == "tcp://h:1"
    assert parse(*remote, "--insecure").wire.events == "tcp://h:2"


def test_check_of_records_takes_non_defaults_as_explicit() -> None:
    with pytest.raises(ConfigError, match="--page-size"):
        check(with_values(Settings(), {"kv_cache_backend": "contiguous", "page_size": 16}))
    with pytest.raises(ConfigError, match="--max-batch-size must be at least 1"):
        check(with_values(Settings(), {"max_batch_size": -1}))
    with pytest.raises(ConfigError, match="no setting pagesize"):
        with_values(Settings(), {"pagesize": 32})


def test_check_is_idempotent() -> None:
    for argv in (
        "--batching-mode static", "--kv-cache-backend contiguous", "--max-step-tokens 32", "--port 8001",
        "--speculation ngram",
    ):  # fmt: skip
        settings = parse(*argv.split())
        assert check(settings) == settings


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/", "https://a,http://b/c", "https://"])
def test_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    assert refuse("--cors-origins", origin).startswith(
        "--cors-origins must be *, localhost or like https://example.com"
    )


@pytest.mark.parametrize("host", ["https://example.com", "example.com:8000", "example.com/", "a.*", "*.", "*a.example"])
def test_allowed_host_that_is_no_name_is_refused(host: str) -> None:
    assert refuse("--allowed-hosts", host).startswith("--allowed-hosts must be * or like api.example.com")


def test_texts_are_recorded_only_in_a_record() -> None:
    assert refuse("--record-text").startswith("--record-text needs --record FILE")
