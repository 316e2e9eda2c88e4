"""If a part of the first hour fails, hangs or lacks a package, all other parts still run. A second run continues."""

import json
import sys
from pathlib import Path

import pytest

from bench.gpu.first_hour import runner
from bench.gpu.first_hour.packages import missing
from bench.gpu.first_hour.parts import MOST_ATTEMPTS, Part
from bench.gpu.first_hour.state import State
from deploy.cli import main

MODELS = ("tiny",)


def part(name: str, module: str, *words: str, cap_s: float = 60.0, packages: tuple[str, ...] = ()) -> Part:
    return Part(name, name, 0.5, cap_s, module=module, words=words, packages=packages)


FINE = part("fine", "platform")
FAILS = part("fails", "json.tool", "/nowhere")
HANGS = part("hangs", "timeit", "-n1", "import time; time.sleep(99)", cap_s=1.0)
LACKS = part("lacks", "platform", packages=("sys", "no_such_package"))
LAST = part("last", "platform", "{device}")


def hour(folder: Path, monkeypatch: pytest.MonkeyPatch, *parts: Part, minutes: float = 5.0) -> int:
    monkeypatch.setattr(runner, "parts_for", lambda models: list(parts))
    return runner.first_hour(folder, "cpu", MODELS, minutes)


def told(folder: Path) -> dict[str, tuple[str, int]]:
    outcomes = State.read(folder, "cpu", MODELS).outcomes
    return {name: (outcome.status, outcome.attempts) for name, outcome in outcomes.items()}


def test_first_hour_each_failure_costs_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hour(tmp_path, monkeypatch, FINE, FAILS, HANGS, LACKS, LAST) == 1
    assert told(tmp_path) == {
        "fine": ("done", 1), "fails": ("failed", 1), "hangs": ("cut", 1), "lacks": ("left out", 0), "last": ("done", 1),
    }  # fmt: skip
    page = (tmp_path / "REPORT.md").read_text()
    assert "bring the wheels of no_such_package" in page and "No such file" in page and "## last" in page


def test_first_hour_repeated_tries_failed_parts_once_more_after_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hour(tmp_path, monkeypatch, FINE, FAILS) == 1
    capsys.readouterr()
    assert hour(tmp_path, monkeypatch, FINE, FAILS, LAST) == 1
    printed = capsys.readouterr().out
    assert printed.index("last: ") < printed.index("fails: ") and "fine: fine (" not in printed
    assert told(tmp_path)["fails"] == ("failed", MOST_ATTEMPTS)
    assert hour(tmp_path, monkeypatch, FINE, FAILS, LAST) == 1
    assert told(tmp_path)["fails"] == ("failed", MOST_ATTEMPTS), "it was tried a third time"


def test_first_hour_without_time_runs_the_rest_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hour(tmp_path, monkeypatch, FINE, minutes=0.001) == 1
    assert told(tmp_path) == {"fine": ("left out", 0)}
    assert hour(tmp_path, monkeypatch, FINE) == 0


def test_first_hour_ended_by_force_counts_the_current_part_as_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        hour(tmp_path, monkeypatch, FINE)
    assert told(tmp_path) == {"fine": ("cut", 1)}


def test_first_hour_essential_part_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    essential = Part("environment", "", 0, 60, module="json.tool", words=("/nowhere",), packages=(), essential=True)
    assert hour(tmp_path, monkeypatch, essential, FINE) == 1
    assert told(tmp_path) == {"environment": ("failed", 1)}


def test_first_hour_of_other_models_in_the_same_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    State(tmp_path, "cuda", ("tiny",)).write()
    words = ["bench", "gpu", "--first-hour", str(tmp_path), "--device", "cpu", "--models", "tiny"]
    assert main.main(words) == 2
    assert "has results of --device cuda --models tiny" in capsys.readouterr().err


def test_bench_part_with_rows_left_out_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake bench writes the rows that the real bench would write."""
    script = "import json, pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text(sys.argv[-1])"
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\nimport sys; sys.argv = sys.argv[2:]\n{script}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))

    def bench(name: str, note: str) -> Part:
        rows = json.dumps({"sections": {"floors": {"rows": [{"what": "copy", "note": note}]}}})
        return Part(name, name, 0, 60, sections=("floors",), words=(rows,), packages=())

    hour(tmp_path / "out", monkeypatch, bench("whole", ""), bench("cut", "left out: no time is left"))
    assert told(tmp_path / "out") == {"whole": ("done", 1), "cut": ("incomplete", 1)}


def test_missing_packages_have_the_names_of_their_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.first_hour.packages.find_spec", lambda name: None if "q" in name else object())
    assert missing(["zmq", "sys"]) == ["pyzmq"]
