from math import isnan, nan
from pathlib import Path

import pytest

from bench.client.server import BenchError
from bench.client.summary import NOTHING
from bench.peers import catalog, engine, in_process
from bench.peers.catalog import Peer
from bench.peers.engine import COUNTS, Case, compare, table


def test_table_has_the_ratio_and_a_dash_for_what_was_not_measured() -> None:
    case = "m, q4_0, avx2"
    rates = [
        [case, "decode8", 130.0, 100.0, 80.0],
        [case, "decode1", 10.0, 5.0, nan],
        [case, "prefill", 10.0, nan, nan],
    ]
    text = table(["sluice", "llama.cpp", "openvino"], rates)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[2] == [case, "decode8", "130", "100", "80", "1.30"]
    assert rows[3] == [case, "decode1", "10", "5", NOTHING, "2.00"]
    assert rows[4] == [case, "prefill", "10", NOTHING, NOTHING, NOTHING]


def test_scenarios_are_what_the_measuring_process_understands() -> None:
    from bench.micro.engine import MEASURES

    assert {words.split()[0] for words in COUNTS.values()} == set(MEASURES)


def test_an_engine_that_cannot_read_the_file_has_no_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Others' lines are read as they come from bench/peers/in_process.py."""
    said = {
        "openvino": 'log {\n{"prompt": 128, "prefill": 9, "decode": 5}\n{"prompt": 1024, "prefill": 7, "decode": 3}',
        "mistral.rs": "",
    }

    def output(command: list[str]) -> str:
        text = said[command[2]]
        if not text:
            raise BenchError("crashed")
        return text

    monkeypatch.setattr(engine, "install_once", lambda *_: None)
    monkeypatch.setattr(engine, "_prepare", lambda case: None)
    monkeypatch.setattr(engine, "output", output)
    case = Case(tmp_path, tmp_path / "m", "file", "best", False)
    rows = compare(case, ["prefill", "decode1", "decode8"], 1, ["openvino", "mistral.rs"])
    assert [row[2] for row in rows[:2]] == [7, 5] and isnan(rows[2][2])
    assert all(isnan(row[3]) for row in rows)


def test_every_engine_that_is_installed_can_be_measured() -> None:
    assert [*catalog.ENGINES] == [*in_process.ENGINES]


def test_only_the_file_of_a_case_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Large shapes have only quantized weights, so a case makes a single file."""
    made: list[str] = []

    def install(peer: Peer, root: Path, folder: Path) -> None:
        made.extend(word for command in peer.prepare(root, folder) for word in command)

    monkeypatch.setattr(engine, "install", install)
    monkeypatch.setattr(engine, "_llama_cpp", lambda case, scenarios: {"decode1": 1.0})
    folder = tmp_path / "llama-8b"
    [row] = compare(Case(tmp_path, folder, "q4_0", "avx2", False), ["decode1"], 1, ["llama.cpp"])
    assert row[:2] == ["llama-8b, q4_0, avx2", "decode1"]
    assert f"{folder}-q4_0.gguf" in made and not any("bf16" in word for word in made)
