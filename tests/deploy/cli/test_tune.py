"""Tests of `sluice tune`: which settings are tried, when one is taken, and the file that `serve --config` reads."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.cli import tune as command
from deploy.cli.config_file import read_config
from deploy.cli.tune import GOALS, Goal, Measured, Trial, Tuner, helps, prompt, trials, write_result
from deploy.cli.verdict import Forecast
from deploy.launcher.child_command import SERVE_FLAGS, CliError
from shared.config.settings import Settings, with_values
from tests.deploy.cli.harness import sluice

PLAIN = Measured(tokens_per_s=10.0, first_s=0.1, seconds=4.0, memory=1 << 30)
FORECAST = Forecast(10**9, 10**9, 50_000, 10**9, 8192, 32768, 24)


def tuner(goal: str, of: Callable[[Settings, int], Measured]) -> tuple[Tuner, list[str]]:
    """Returns a tuner whose measurements are those of `of`, and the list of what it has measured."""
    order: list[str] = []

    def measure(settings: Settings, goal: Goal) -> Measured:
        order.append(f"{settings.worker.threads}")
        return of(settings, len(order))

    return Tuner(Settings(), GOALS[goal], 3, io.StringIO(), measure), order


THREADS = Trial("threads", ({"threads": 2}, {"threads": 1}))


def test_settings_take_turns_and_every_other_round_goes_backwards() -> None:
    it, order = tuner("latency", lambda settings, n: PLAIN)
    assert it.run([THREADS]) == {}
    assert order == ["0", "2", "1", "1", "2", "0", "0", "2", "1"]


def test_the_best_that_helps_in_every_round_is_taken_and_kept_for_the_next_trials() -> None:
    seconds = {0: 4.0, 2: 3.0, 1: 2.0}
    it, _ = tuner("latency", lambda settings, n: replace(
        PLAIN, seconds=seconds[settings.worker.threads] - (settings.worker.speculation == "off")))  # fmt: skip
    best = it.run([THREADS, Trial("speculation", ({"speculation": "off"},))])
    assert best == {"threads": 1, "speculation": "off"}
    table = it.table()
    assert [line.split()[0] for line in table] == [
        "SETTING",
        "without",
        "--threads",
        "--threads",
        "without",
        "--speculation",
    ]
    assert "x2.00 (2.00-2.00)" in table[3] and table[3].endswith("taken") and not table[2].endswith("taken")
    assert "without (--threads 1)" in table[4]


def test_a_setting_that_loses_one_round_or_wins_little_is_left() -> None:
    assert helps([1.2, 1.1, 1.01], 0.0) and not helps([1.5, 1.5, 0.99], 0.0) and not helps([1.02, 1.02, 1.02], 0.0)
    it, _ = tuner("throughput", lambda settings, n: replace(
        PLAIN, tokens_per_s=20.0 if settings.worker.threads == 2 and n < 6 else 10.0))  # fmt: skip
    assert it.run([THREADS]) == {}, "in the last round it was not better"


def test_a_setting_that_wins_less_than_the_same_settings_differ_is_left_and_the_noise_is_told() -> None:
    # the machine slows down from round to round: by a quarter in all; threads help by a tenth, or by a half
    for gain, taken in ((1.1, {}), (1.5, {"threads": 2})):
        it, _ = tuner("latency", lambda settings, n, gain=gain: replace(  # type: ignore[misc]
            PLAIN, seconds=4.0 * (1 + (n - 1) // 2 / 8) / (gain if settings.worker.threads == 2 else 1)))  # fmt: skip
        assert it.run([Trial("threads", ({"threads": 2},))]) == taken
        assert "noise 25.0%" in it.table()[1] and it.table()[2].endswith("taken") == bool(taken)
        assert it.reasons == ({"threads": "threads: x1.50 (1.50-1.50) better, with a noise of 25.0%"} if taken else {})


def test_less_memory_must_not_cost_much_speed() -> None:
    better = GOALS["memory"].better
    assert better(replace(PLAIN, memory=1 << 29), PLAIN) == 2.0
    assert better(replace(PLAIN, memory=1 << 29, tokens_per_s=7.9), PLAIN) == 0.0
    it, _ = tuner("memory", lambda settings, n: replace(
        PLAIN, memory=PLAIN.memory >> (settings.worker.kv_cache_dtype == "int8")))  # fmt: skip
    assert it.run([Trial("K/V", ({"kv_cache_dtype": "int8"},), changes=True)]) == {"kv_cache_dtype": "int8"}
    assert it.changing == ["kv-cache-dtype"]


def test_a_setting_with_which_the_model_cannot_be_served_is_left_out() -> None:
    def of(settings: Settings, n: int) -> Measured:
        if settings.worker.threads == 2:
            raise CliError("the server did not start:\nit does not fit", 3)
        return replace(PLAIN, seconds=4.0 - settings.worker.threads)

    it, order = tuner("latency", of)
    assert it.run([THREADS]) == {"threads": 1} and len(it.table()) == 3
    assert order.count("2") == 1 and "not possible: it does not fit\n" in str(it.stream.getvalue())  # type: ignore[attr-defined]
    it, _ = tuner("latency", of)
    assert it.run([Trial("threads", ({"threads": 2},))]) == {}
    it.settings = with_values(Settings(), {"threads": 2})
    with pytest.raises(CliError):
        it.run([Trial("speculation", ({"speculation": "off"},))])


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_all_that_is_tried_can_be_served(monkeypatch: pytest.MonkeyPatch, goal: str, on_gpu: bool) -> None:
    monkeypatch.setattr(command, "usable_cores", lambda: 8)
    found = trials(goal, Settings(), FORECAST, on_gpu=on_gpu)
    for trial in found:
        for option in trial.settings:
            assert with_values(Settings(), option) != Settings()
    names = {name for trial in found for option in trial.settings for name in option}
    assert ("threads" in names) == (not on_gpu) and ("kv_cache_gb" in names) == (goal == "memory")
    changing = {name for trial in found if trial.changes for option in trial.settings for name in option}
    assert changing <= ({"kv_cache_dtype", "kv_cache_gb", "quantization"} if goal == "memory" else {"activations"})
    few = with_values(Settings(), {"model": "x.gguf"})
    tried = [one.settings for one in trials(goal, few, FORECAST, on_gpu=on_gpu) if one.name == "inputs"]
    assert tried == ([({"activations": "int8"},)] if goal != "memory" and not on_gpu else [])


def test_fewer_bits_of_k_v_are_tried_with_a_pool_for_as_many_tokens_and_what_is_given_is_not_tried() -> None:
    [pool, formats] = [one for one in trials("memory", Settings(), FORECAST, on_gpu=False) if "K/V" in one.name]
    sizes = [float(str(one["kv_cache_gb"])) for one in (*pool.settings, *formats.settings)]
    assert [one["kv_cache_dtype"] for one in formats.settings] == ["int8", "int4"]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < sizes[0] / 2
    [formats] = [
        one
        for one in trials("memory", Settings(), FORECAST, on_gpu=False, stated=("kv_cache_gb",))
        if "K/V" in one.name
    ]
    assert formats.settings == ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"})
    assert not trials("memory", Settings(), None, on_gpu=True, stated=("kv_cache_dtype", "quantization"))


def test_prompts_differ_from_their_first_word_on() -> None:
    texts = {prompt(text, f"{mark} {n}") for n, text in enumerate(command.TEXTS) for mark in ("warm", "run")}
    assert len({text.split(".")[0] for text in texts}) == len(texts) == 6


def test_the_file_is_one_that_serve_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(settings: Settings, goal: Goal) -> Measured:
        assert settings.model.max_seq_len == 64
        return replace(PLAIN, seconds=4.0 - (settings.worker.speculation == "off"))

    monkeypatch.setattr(command, "measure_server", measure)
    monkeypatch.setattr(command, "judge_local", lambda model, settings, timed: SimpleNamespace(forecast=FORECAST))
    monkeypatch.setattr(command, "visible_gpus", lambda: [])
    model, out = tmp_path / "x.gguf", tmp_path / "out.toml"
    model.write_bytes(b"")
    words = ("--model", str(model), "--max-seq-len", "64", "--threads", "3", "--out", str(out))
    code, shown, _ = sluice(capsys, "tune", *words)
    assert code == 0 and "taken" in shown and f"sluice serve --config {out}" in shown
    assert "--threads" not in shown, "what the user gave is not tried"
    assert read_config(out, SERVE_FLAGS) == {
        "model": str(model), "max_seq_len": 64, "threads": 3, "speculation": "off",
    }  # fmt: skip
    assert any(
        line.startswith("# --speculation off") and line.endswith("taken") for line in out.read_text().splitlines()
    )
    lines = out.read_text().splitlines()
    for setting, why in (("max-seq-len", "given to sluice tune"), ("speculation", "speculation: x1.33")):
        [place] = [place for place, line in enumerate(lines) if line.startswith(f"{setting} = ")]
        assert lines[place - 1].startswith(f"# {why}")
    monkeypatch.setenv("SLUICE_SPECULATION", "ngram")
    assert sluice(capsys, "tune", *words)[0] == 0
    assert read_config(out, SERVE_FLAGS)["speculation"] == "ngram", "the variable would win over the file"


def test_one_model_on_this_machine_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sluice(capsys, "tune", "--model", "a", "b")[0] == 2
    code, _, told = sluice(capsys, "tune", "--model", "org/x")
    assert code == 2 and "sluice pull org/x" in told
    code, _, told = sluice(capsys, "tune", "--rounds", "1")
    assert code == 2 and "--rounds" in told
    code, _, told = sluice(capsys, "tune", "--goal", "speed")
    assert code == 2 and "--goal" in told


def test_a_file_that_cannot_be_written_is_refused_before_the_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "x.gguf"
    model.write_bytes(b"")
    monkeypatch.setattr(command, "measure_server", lambda settings, goal: pytest.fail("it measures"))
    code, _, told = sluice(capsys, "tune", "--model", str(model), "--out", "/proc/self/out.toml")
    assert code == 2 and "--out /proc/self/out.toml cannot be written" in told


def test_what_cannot_be_written_in_the_end_is_shown_and_leaves_the_old_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.toml"
    write_result(file, "a = 1\n")
    with pytest.raises(CliError, match="cannot be written"):
        write_result(tmp_path / "gone" / "x", "a = 2\n")
    assert file.read_text() == "a = 1\n" and "a = 2" in capsys.readouterr().out
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    write_result(link, "a = 3\n")
    assert link.is_symlink() and file.read_text() == "a = 3\n" and len([*tmp_path.iterdir()]) == 2


def test_variables_do_not_reach_the_server_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def served(flags: list[str], stream: object, environment: dict[str, str]) -> None:
        seen.update(environment)
        raise CliError("enough", 1)

    monkeypatch.setenv("SLUICE_API_KEY", "sk-x")
    monkeypatch.setattr(command, "served", served)
    with pytest.raises(CliError, match="enough"):
        command.measure_server(Settings(), GOALS["latency"])
    assert "PATH" in seen and "SLUICE_API_KEY" not in seen
