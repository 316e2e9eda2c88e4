"""Flags, variables and the rules between settings."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given as generated
from hypothesis import settings as how
from hypothesis import strategies as st

from shared.config import ConfigError, Settings, with_values
from shared.default_sizes import with_default_sizes
from shared.flags import Parser, add_flags, all_flags, misspelt_variables, read, select, to_argv, without_settings
from shared.settings_check import check

FLAGS = all_flags()


def parse(*argv: str, **environment: str) -> Settings:
    parser = Parser(prog="sluice serve")
    add_flags(parser, FLAGS)
    return read(parser.read(argv), environment, FLAGS)


def refuse(*argv: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, **environment)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_two_settings_share_a_name() -> None:
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names)


def test_nothing_given_is_the_default_and_the_defaults_fit_together() -> None:
    assert parse() == Settings()


def test_flags_win_over_the_environment_and_that_over_defaults() -> None:
    settings = parse("--port", "1", SLUICE_PORT="2", SLUICE_FRONTENDS="3")
    assert (settings.frontend.port, settings.launch.frontends) == (1, 3)


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_booleans_in_the_environment(text: str) -> None:
    assert parse(SLUICE_BATCH_INVARIANT=text).worker.batch_invariant is False
    assert parse("--batch-invariant", SLUICE_BATCH_INVARIANT=text).worker.batch_invariant is True


def test_a_variable_that_is_nearly_a_setting_is_told_and_others_are_left_alone() -> None:
    said = misspelt_variables({"SLUICE_MAX_BATCHSIZE": "8", "SLUICE_MODELS": "x"})
    assert said == [
        "SLUICE_MAX_BATCHSIZE is not a setting; did you mean SLUICE_MAX_BATCH_SIZE?",
        "SLUICE_MODELS is not a setting; did you mean SLUICE_MODEL?",
    ]
    ours = dict.fromkeys(flag.variable for flag in FLAGS) | {"SLUICE_NATIVE_TIER": "", "SLUICE_API_KEY": ""}
    kubernetes = dict.fromkeys(("SLUICE_SERVICE_HOST", "SLUICE_PORT_80_TCP", "SLUICE_SERVICE_PORT_HTTP"))
    assert misspelt_variables({name: "" for name in [*ours, *kubernetes]}) == []


def test_help_names_every_flag_its_unit_default_and_variable() -> None:
    parser = Parser(prog="sluice serve")
    add_flags(parser, FLAGS)
    text = " ".join(parser.format_help().split())
    for flag in FLAGS:
        assert flag.option in text
        assert f"{flag.variable}]" in text
    assert (
        "maximum tokens of one prompt in one step [tokens; default 512, on a GPU 2048; SLUICE_PREFILL_CHUNK_SIZE]"
        in text
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "http"], "--port must be a whole number, not 'http'"),
        (["--port", "65536"], "--port must be at most 65535"),
        (["--keepalive-s", "0"], "--keepalive-s must be above 0"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be at most 1"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization must be above 0"),
        (["--drain-timeout", "nan"], "--drain-timeout must be a finite number"),
        (["--drain-timeout", "soon"], "--drain-timeout must be a number"),
        (["--prefill-chunk-size", "0"], "--prefill-chunk-size must be at least 1"),
        (["--max-batch-size", "0"], "--max-batch-size must be at least 1"),
        (["--frontends", "0"], "--frontends must be at least 1"),
        (["--device", "tpu"], "--device must be one of auto, cpu, cuda"),
        (["--metrics-prefix", "9-"], "--metrics-prefix"),
        (["--model", ""], "--model"),
        (["--served-model-name", "m\udcff"], "--served-model-name must be valid UTF-8"),
        (["--model", "/models/m\udcff"], "--served-model-name must be valid UTF-8"),
        (["--port"], "--port"),
        (["--frontend", "2"], "unknown flag --frontend; did you mean --frontends?"),
        (["--pagesize=4"], "unknown flag --pagesize; did you mean --page-size?"),
        (["demo"], "unexpected argument 'demo'"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_flag(argv: list[str], words: str) -> None:
    assert words in refuse(*argv)


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    assert refuse(SLUICE_PORT="x").startswith("SLUICE_PORT must be a whole number")
    assert refuse(SLUICE_PREFIX_CACHE="maybe").startswith("SLUICE_PREFIX_CACHE must be 1 or 0")
    assert refuse(SLUICE_DTYPE="int8").startswith("SLUICE_DTYPE must be one of")


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
        ("--prefill-chunk-size 600 --max-step-tokens 512", ("--prefill-chunk-size", "--max-step-tokens")),
        ("--max-batch-size 64 --max-step-tokens 32", ("--max-batch-size", "--max-step-tokens")),
        ("--speculation off --max-draft-tokens 3", ("--max-draft-tokens", "--speculation off")),
        ("--speculation ngram --no-batch-invariant", ("--speculation ngram", "--batch-invariant")),
        ("--speculation ngram --overlap", ("--speculation ngram", "--no-overlap")),
        ("--stop-timeout 5 --drain-timeout 5", ("--stop-timeout", "--drain-timeout")),
        ("--port 9000 --worker-metrics-port 9000", ("--port", "--worker-metrics-port")),
        ("--request-address tcp://h:1 --event-address ipc:///e", ("--request-address", "--event-address")),
        ("--request-address tcp://h:1 --event-address tcp://h:2", ("--request-address", "--curve-dir", "--insecure")),
        ("--request-address udp://h:1", ("--request-address", "--event-address")),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(argv: str, flags: tuple[str, ...]) -> None:
    sentence = refuse(*argv.split())
    assert all(flag in sentence for flag in flags)


def test_being_asked_for_counts_in_the_environment_too() -> None:
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
def test_a_default_gives_way_to_what_was_asked_for(argv: str, expected: dict[str, Any]) -> None:
    worker = parse(*argv.split()).worker
    assert {name: getattr(worker, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("argv", "on_gpu", "step", "batch", "chunk"),
    [
        ("", False, 512, 64, 512),
        ("", True, 2048, 256, 2048),
        ("--prefill-chunk-size 4096", True, 4096, 256, 4096),
        ("--max-step-tokens 32", False, 32, 32, 32),
        ("--max-batch-size 2000 --prefill-chunk-size 3000", False, 3000, 2000, 3000),
        ("--max-batch-size 8 --prefill-chunk-size 100", True, 2048, 8, 100),
        ("--no-use-chunked-prefill --prefill-chunk-size 900", False, 512, 64, 900),
    ],
)
def test_a_step_fits_the_device_and_what_was_asked_for(
    argv: str, on_gpu: bool, step: int, batch: int, chunk: int
) -> None:
    worker = with_default_sizes(parse(*argv.split()).worker, on_gpu=on_gpu)
    assert (worker.max_step_tokens, worker.max_batch_size, worker.prefill_chunk_size) == (step, batch, chunk)
    assert with_default_sizes(worker, on_gpu=not on_gpu) == worker


def test_children_are_killed_only_after_they_had_time_to_drain() -> None:
    assert parse("--drain-timeout", "100").launch.stop_timeout > 100
    assert parse("--stop-timeout", "8").worker.drain_timeout < 8


def test_remote_addresses_with_keys_or_without() -> None:
    remote = ("--request-address", "tcp://h:1", "--event-address", "tcp://h:2")
    assert parse(*remote, "--curve-dir", "keys").wire.requests == "tcp://h:1"
    assert parse(*remote, "--insecure").wire.events == "tcp://h:2"


def test_records_made_in_code_are_checked_by_what_differs_from_the_default() -> None:
    with pytest.raises(ConfigError, match="--page-size"):
        check(with_values(Settings(), {"kv_cache_backend": "contiguous", "page_size": 16}))
    with pytest.raises(ConfigError, match="--max-batch-size must be at least 1"):
        check(with_values(Settings(), {"max_batch_size": -1}))
    with pytest.raises(ConfigError, match="no setting pagesize"):
        with_values(Settings(), {"pagesize": 32})


def test_check_leaves_alone_what_it_returned() -> None:
    for argv in (
        "--batching-mode static", "--kv-cache-backend contiguous", "--max-step-tokens 32", "--port 8001",
        "--speculation ngram",
    ):  # fmt: skip
        settings = parse(*argv.split())
        assert check(settings) == settings


@how(deadline=None)
@generated(st.fixed_dictionaries({}, optional={
    "port": st.integers(0, 65535), "model": st.text("aZ9-_./= ", min_size=1),
    "seed": st.integers(-1, 2**64 - 1), "prefix_cache": st.booleans(), "keepalive_s": st.floats(0.001, 1e9),
    "batching_mode": st.sampled_from(["continuous", "static"]), "max_step_tokens": st.integers(0, 1 << 20),
}))  # fmt: skip
def test_settings_survive_the_way_to_a_child(values: dict[str, Any]) -> None:
    settings = check(with_values(Settings(), values), values.keys())
    assert parse(*to_argv(settings, FLAGS)) == settings


def test_a_child_is_told_by_flags_only() -> None:
    assert without_settings({"SLUICE_PORT": "1", "SLUICE_EPOCH": "2", "HOME": "/"}) == {
        "SLUICE_EPOCH": "2",
        "HOME": "/",
    }
    assert {flag.name for flag in select(("launch",), ("port",))} == {
        "frontends",
        "workers",
        "stop_timeout",
        "load_timeout",
        "port",
    }


def test_every_setting_says_what_it_is_for() -> None:
    for flag in FLAGS:
        assert dataclasses.is_dataclass(getattr(Settings(), flag.record))
        assert len(flag.field.metadata["help"]) > 10
