"""If a measuring process raises, dies or hangs, only the running task is lost."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from bench.client.server import BenchError
from bench.gpu import command, driver
from bench.gpu.compile_time import CACHED_S, watch_compilations
from bench.gpu.driver import Driver
from bench.gpu.sections import Options, Section, Task
from bench.gpu.tables import Table

OPTIONS = Options("cpu", ("tiny",), True, 1)


def section(name: str, cap_s: float = 60.0) -> Section:
    return Section(
        name, name, ("what", "value"), f"tests.bench.gpu.failing_tasks:{name}", lambda options: (), 0.0, cap_s
    )


@pytest.fixture
def handed_out() -> list[Table]:
    return []


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IO[bytes]]:
    with (tmp_path / "log").open("wb") as file:
        yield file


def drive(handed_out: list[Table], log: IO[bytes], budget: float = 200.0) -> Driver:
    return Driver(OPTIONS, time.time() + budget, log, handed_out.append)


def test_driver_each_failure_loses_one_task_and_is_noted(log: IO[bytes], handed_out: list[Table]) -> None:
    fine, raises, dies = section("fine"), section("raises"), section("dies")
    hangs = section("hangs", 1.0)
    tasks = [Task(fine, "a"), Task(raises, "b"), Task(dies, "c"), Task(dies, "d"), Task(hangs, "e"), Task(fine, "f")]
    tables = drive(handed_out, log).run(tasks)
    said = {table.section.name: [row.get("note", "") for row in table.rows] for table in tables}
    assert [table.section.name for table in tables] == ["fine", "raises", "dies", "hangs"]
    assert re.fullmatch(r"failed: ValueError: no such thing \(failing_tasks\.py:\d+\)", str(said["raises"][1]))
    assert said["dies"] == ["", "failed: its process ended with 9"] * 2
    assert said["hangs"] == ["", "failed: it took too long and was ended"]
    assert [row["value"] for row in tables[0].rows] == [1.0, 2.0]  # results outlive the process that found them
    assert [table.well for table in tables] == [True, False, False, False]


def test_driver_reports_tables_when_complete(log: IO[bytes], handed_out: list[Table]) -> None:
    drive(handed_out, log).run([Task(section("fine"), "a"), Task(section("raises"), "b")])
    assert [table.section.name for table in handed_out] == ["fine", "raises"]


def test_driver_worker_warnings_make_a_table_not_well(log: IO[bytes], handed_out: list[Table]) -> None:
    (table,) = drive(handed_out, log).run([Task(section("warns"), "a")])
    assert table.rows[1]["note"] == "warned: slower from now on"
    assert not table.well


def test_driver_skips_tasks_after_the_budget(
    log: IO[bytes], handed_out: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 0.0  # seconds by which the test moves the budget's clock forward while the hanging task runs
    monkeypatch.setattr(driver, "time", SimpleNamespace(time=lambda: time.time() + late))

    def put_forward() -> None:
        nonlocal late
        late = 2 * driver.START_S

    measuring = replace(drive(handed_out, log), on_row=put_forward)
    hung, rest = measuring.run([Task(section("hangs", 1e6), "a"), Task(section("fine"), "b")])
    assert not hung.well and rest.well
    assert rest.rows == [{"what": "b", "note": "left out: no time is left"}]


def test_driver_whose_process_does_not_start_fails_all_tasks(
    log: IO[bytes], handed_out: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    tables = drive(handed_out, log).run([Task(section("fine"), "a"), Task(section("dies"), "b")])
    assert [table.rows[0]["note"] for table in tables] == [
        "failed: the process that was to measure it did not start"
    ] * 2


class Compiles:
    """A fake measuring process, which compiles for a while and then measures."""

    def __init__(self) -> None:
        self.extended = 0.0

    def set_limit(self, seconds: float, at_most: float) -> None: ...

    def extend_limit(self, seconds: float, at_most: float) -> None:
        self.extended += seconds

    def events(self) -> Iterator[dict[str, object]]:
        yield from ({"begin": "it"}, {"compiled": 1.5}, {"compiled": 2.0}, {"row": {"what": "a", "value": 1.0}})
        yield {"end": 4.0, "failed": "", "broken": False}


def test_driver_compilations_extend_the_limit_and_have_a_row(log: IO[bytes], handed_out: list[Table]) -> None:
    driver_, process = drive(handed_out, log), Compiles()
    driver_._collect(process, [Task(section("fine"), "a")])  # type: ignore[arg-type]
    assert process.extended == 3.5
    _, compiling = driver_.run([])
    assert compiling.rows == [{"section": "fine", "compiled": 2, "s": 3.5}] and handed_out[-1] is compiling


def test_compilations_are_timed_unless_the_cache_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, seconds: time.sleep(seconds))
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: None)
    seen: list[float] = []
    watch_compilations(seen.append)
    JITFunction._do_compile(None, 0.0)
    JITFunction._do_compile(None, 2 * CACHED_S)
    CompiledKernel._init_handles(None)
    assert len(seen) == 1 and seen[0] >= 2 * CACHED_S


def test_driver_without_a_gpu_raises_bench_error(
    log: IO[bytes], handed_out: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BenchError, match="--device cuda: "):
        Driver(replace(OPTIONS, device="cuda"), time.time() + 100, log, handed_out.append).run(
            [Task(section("fine"), "a")]
        )


def test_driver_with_spent_budget_skips_all_tasks_with_a_note(log: IO[bytes], handed_out: list[Table]) -> None:
    late = Section(
        "fine", "fine", ("what", "value"), "tests.bench.gpu.failing_tasks:fine", lambda options: (), 9.0, 9.0
    )
    (table,) = drive(handed_out, log, 5.0).run([Task(late, "a")])
    assert table.rows[0]["what"] == "a" and str(table.rows[0]["note"]).startswith("left out: ")
    assert table.well


def test_gpu_command_keeps_results_when_interrupted(
    tmp_path: Path, log: IO[bytes], handed_out: list[Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt, the command has kept its results, and its measuring process has ended."""
    fine = section("fine")
    chosen = [Task(fine, "a"), Task(fine, "b"), Task(section("hangs"), "c"), Task(section("dies"), "d")]
    monkeypatch.setattr(command, "tasks", lambda names, options: chosen)
    rows = tmp_path / "rows"

    def end() -> None:
        while not (rows.exists() and "hangs" in rows.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    assert command.main(["--device", "cpu", "--models", "tiny", "--json", str(rows)]) == 1
    tables = json.loads(rows.read_text())["sections"]
    told = {name: [row.get("note") for row in table["rows"]] for name, table in tables.items()}
    assert told == {"fine": [None, None], "hangs": [None, "failed: it was ended"], "dies": ["left out: it was ended"]}
