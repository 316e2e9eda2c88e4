"""Reading settings from flags and variables."""

from typing import Any

import pytest
from hypothesis import given as generated
from hypothesis import settings as how
from hypothesis import strategies as st

from shared.config.check import check
from shared.config.flags import (
    Parser,
    add_flags,
    misspelt_variables,
    secret_variables,
    select,
    to_argv,
    without_settings,
)
from shared.config.settings import Settings, with_values
from tests.shared.harness import FLAGS, parse, refuse


def test_empty_command_line_gives_the_defaults() -> None:
    assert parse() == Settings()


def test_flag_wins_over_variable_and_variable_over_default() -> None:
    settings = parse("--port", "1", SLUICE_PORT="2", SLUICE_FRONTENDS="3")
    assert (settings.frontend.port, settings.launch.frontends) == (1, 3)


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
def test_boolean_variable_accepts_common_words(text: str) -> None:
    assert parse(SLUICE_BATCH_INVARIANT=text).worker.batch_invariant is False
    assert parse("--batch-invariant", SLUICE_BATCH_INVARIANT=text).worker.batch_invariant is True


def test_misspelt_variable_is_reported_and_others_are_ignored() -> None:
    warnings = misspelt_variables({"SLUICE_MAX_BATCHSIZE": "8", "SLUICE_MODELL": "x"})
    assert warnings == [
        "SLUICE_MAX_BATCHSIZE is not a setting; did you mean SLUICE_MAX_BATCH_SIZE?",
        "SLUICE_MODELL is not a setting; did you mean SLUICE_MODEL?",
    ]
    ours = dict.fromkeys(flag.variable for flag in FLAGS) | {"SLUICE_ISA": "", "SLUICE_EPOCH": ""}
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
        (["--metrics-prefix", "vllm:", "--metrics-aliases", "vllm"], "--metrics-aliases"),
        (["--metrics-prefix", "llamacpp:", "--metrics-aliases", "llama.cpp"], "--metrics-aliases llama.cpp repeats"),
        (["--model", ""], "--model"),
        (["--served-model-name", "m\udcff"], "--served-model-name must be valid UTF-8"),
        (["--model", "/models/m\udcff"], "--served-model-name must be valid UTF-8"),
        (["--port"], "--port"),
        (["--frontend", "2"], "unknown flag --frontend; did you mean --frontends?"),
        (["--pagesize=4"], "unknown flag --pagesize; did you mean --page-size?"),
        (["demo"], "unexpected argument 'demo'"),
    ],
)
def test_bad_value_is_one_line_that_names_the_flag(argv: list[str], words: str) -> None:
    assert words in refuse(*argv)


def test_bad_variable_is_named() -> None:
    assert refuse(SLUICE_PORT="x").startswith("SLUICE_PORT must be a whole number")
    assert refuse(SLUICE_PREFIX_CACHE="maybe").startswith("SLUICE_PREFIX_CACHE must be 1 or 0")
    assert refuse(SLUICE_DTYPE="int8").startswith("SLUICE_DTYPE must be one of")


@how(deadline=None)
@generated(st.fixed_dictionaries({}, optional={
    "port": st.integers(0, 65535), "model": st.text("aZ9-_./= ", min_size=1),
    "seed": st.integers(-1, 2**64 - 1), "prefix_cache": st.booleans(), "keepalive_s": st.floats(0.001, 1e9),
    "batching_mode": st.sampled_from(["continuous", "static"]), "max_step_tokens": st.integers(0, 1 << 20),
}))  # fmt: skip
def test_settings_round_trip_through_a_command_line(values: dict[str, Any]) -> None:
    settings = check(with_values(Settings(), values), values.keys())
    assert parse(*to_argv(settings, FLAGS)) == settings


@pytest.mark.parametrize("words", [("a,b",), ("a", "b"), ("a", "--api-key", "b")])
def test_setting_that_takes_many_is_a_list_or_repeated(words: tuple[str, ...]) -> None:
    assert parse("--api-key", *words).frontend.api_key == "a,b" == parse(SLUICE_API_KEY="a,b").frontend.api_key
    assert parse("--cors-origins", "https://a", "*", "--port", "1").frontend.cors_origins == "https://a,*"


def test_secret_is_in_the_environment_of_a_child_and_not_in_its_command_line() -> None:
    settings = parse("--api-key", "sk-secret", "--port", "1")
    argv, variables = to_argv(settings, FLAGS), secret_variables(settings, FLAGS)
    assert argv == ["--port=1"] and variables == {"SLUICE_API_KEY": "sk-secret"}
    assert parse(*argv, **variables) == settings
    assert without_settings(variables) == {}


def test_child_environment_has_no_settings() -> None:
    assert without_settings({"SLUICE_PORT": "1", "SLUICE_EPOCH": "2", "HOME": "/"}) == {
        "SLUICE_EPOCH": "2",
        "HOME": "/",
    }
    assert {flag.name for flag in select(("launch",), ("port",))} == {
        "frontends",
        "workers",
        "prefill_workers",
        "stop_timeout",
        "load_timeout",
        "port",
    }
