"""If a part of a command fails, hangs or lacks a package, all other parts still run. A later command continues."""

import json
import sys
import time
from pathlib import Path

import pytest

from bench.gpu.calls import archives, part_process, report, runner
from bench.gpu.calls.archives import pack_cache, pack_results, unpack_cache, unpack_results
from bench.gpu.calls.packages import missing
from bench.gpu.calls.parts import MOST_ATTEMPTS, Part
from bench.gpu.calls.state import State
from bench.gpu.driver import TOOK_TOO_LONG
from deploy.cli import main

MODELS = ("tiny",)


def part(
    name: str, code: str, *words: str, cap_s: float = 60.0, packages: tuple[str, ...] = (), beside: bool = False
) -> Part:
    return Part(name, name, "checks", 0.5, cap_s, words=("-c", code, *words), packages=packages, beside=beside)


FINE = part("fine", "print('fine')")
FAILS = part("fails", "raise SystemExit('no such thing')")
HANGS = part("hangs", "import time; print('hung', flush=True); time.sleep(99)", cap_s=1.0)
LACKS = part("lacks", "", packages=("sys", "no_such_package"))
LAST = part("last", "import sys; print(sys.argv)", "{device}")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(part_process, "KILL_S", 1.0)
    monkeypatch.setattr(runner, "PACKING_S", 0.0)
    monkeypatch.setenv(runner.CACHE, str(tmp_path / "cache"))


def call(folder: Path, monkeypatch: pytest.MonkeyPatch, *parts: Part, minutes: float = 5.0) -> int:
    monkeypatch.setattr(runner, "parts_for", lambda call, models: list(parts))
    monkeypatch.setattr(report, "PARTS", parts)
    return runner.run_call("checks", folder, folder, "cpu", MODELS, minutes)


def told(out: Path, tmp_path: Path) -> dict[str, tuple[str, int]]:
    folder = tmp_path / f"unpacked-{time.monotonic_ns()}"
    folder.mkdir()
    assert unpack_results(out, folder)
    outcomes = State.read(folder, "cpu", MODELS).outcomes
    return {name: (outcome.status, outcome.attempts) for name, outcome in outcomes.items()}


def page(out: Path, tmp_path: Path) -> str:
    folder = tmp_path / f"page-{time.monotonic_ns()}"
    folder.mkdir()
    unpack_results(out, folder)
    return (folder / "REPORT.md").read_text()


def test_each_failure_costs_its_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert call(out, monkeypatch, FINE, FAILS, HANGS, LACKS, LAST) == 1
    assert told(out, tmp_path) == {
        "fine": ("done", 1), "fails": ("failed", 1), "hangs": ("cut", 1), "lacks": ("left out", 0), "last": ("done", 1),
    }  # fmt: skip
    text = page(out, tmp_path)
    assert "bring the wheels of no_such_package" in text and "no such thing" in text and "## last" in text
    assert [file.name for file in out.iterdir()] == ["results.tar.gz"]


def test_a_later_command_tries_failed_parts_once_more_after_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert call(out, monkeypatch, FINE, FAILS) == 1
    capsys.readouterr()
    assert call(out, monkeypatch, FINE, FAILS, LAST) == 1
    printed = capsys.readouterr().out
    assert printed.index("last: ") < printed.index("fails: ") and "fine: fine (" not in printed
    assert told(out, tmp_path)["fails"] == ("failed", MOST_ATTEMPTS)
    assert call(out, monkeypatch, FINE, FAILS, LAST) == 1
    assert told(out, tmp_path)["fails"] == ("failed", MOST_ATTEMPTS), "it was tried a third time"


def test_parts_side_by_side_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part ends only when the other one has begun."""
    code = (
        "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)"
    )
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    parts = part("one", code, one, other, beside=True), part("other", code, other, one, beside=True)
    assert call(tmp_path / "out", monkeypatch, *parts) == 0


def test_without_time_the_rest_runs_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert call(out, monkeypatch, FINE, minutes=0.001) == 1
    assert told(out, tmp_path) == {"fine": ("left out", 0)}
    assert call(out, monkeypatch, FINE) == 0


def test_ended_by_force_the_current_part_counts_as_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "PartProcess", killed)
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path / "out", monkeypatch, FINE)
    assert told(tmp_path / "out", tmp_path) == {"fine": ("cut", 1)}


def test_essential_part_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    essential = Part("environment", "", "", 0, 60, words=("-c", "raise SystemExit(1)"), packages=(), essential=True)
    assert call(tmp_path / "out", monkeypatch, essential, FINE) == 1
    assert told(tmp_path / "out", tmp_path) == {"environment": ("failed", 1)}


def test_results_of_other_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, out = tmp_path / "before", tmp_path / "out"
    before.mkdir()
    State(before, "cuda", ("tiny",)).write()
    pack_results(before, out)
    words = ["bench", "gpu", "--call", "checks", "--results", str(out), "--device", "cpu", "--models", "tiny"]
    assert main.main(words) == 2
    assert "are those of --device cuda --models tiny" in capsys.readouterr().err
    assert main.main(["bench", "gpu", "--call", "checks"]) == 2
    assert "--call needs --results DIR" in capsys.readouterr().err


def test_bench_part_with_rows_left_out_or_cut_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake bench writes the rows that the real bench would write."""
    script = "import json, pathlib, sys; pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text(sys.argv[-1])"
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\nimport sys; sys.argv = sys.argv[2:]\n{script}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))

    def bench(name: str, note: str) -> Part:
        rows = json.dumps({"sections": {"floors": {"rows": [{"what": "copy", "note": note}]}}})
        return Part(
            name,
            name,
            "checks",
            0,
            60,
            sections=("floors",),
            words=(rows.replace("{", "{{").replace("}", "}}"),),
            packages=(),
        )

    notes = {"whole": "", "cut": "left out: no time is left", "late": f"failed: {TOOK_TOO_LONG}"}
    call(tmp_path / "out", monkeypatch, *(bench(name, note) for name, note in notes.items()))
    statuses = {"whole": ("done", 1), "cut": ("incomplete", 1), "late": ("incomplete", 1)}
    assert told(tmp_path / "out", tmp_path) == statuses


def test_compiled_kernels_come_back_in_pieces_at_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "PIECE_BYTES", 300)
    cache, out, root = tmp_path / "cache", tmp_path / "out", tmp_path / "root"
    (cache / "key").mkdir(parents=True)
    out.mkdir()
    for name, content in (("kernel.cubin", bytes(range(256)) * 2), ("kernel.json", b"{}"), ("kernel.ttir", b"text")):
        (cache / "key" / name).write_bytes(content)
    assert "1 compiled kernels are kept" in pack_cache(cache, out)
    assert 1 < len(list(out.iterdir())) <= archives.MOST_FILES
    assert unpack_cache(out, root) and not unpack_cache(tmp_path / "cache", root)
    found = root / str(cache).lstrip("/") / "key"
    assert sorted(file.name for file in found.iterdir()) == ["kernel.cubin", "kernel.json"]
    assert (found / "kernel.cubin").read_bytes() == bytes(range(256)) * 2
    monkeypatch.setattr(archives, "PIECE_BYTES", 20)
    assert "too much to keep" in pack_cache(cache, out)


def test_missing_packages_have_the_names_of_their_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.calls.packages.find_spec", lambda name: None if "q" in name else object())
    assert missing(["zmq", "sys"]) == ["pyzmq"]
