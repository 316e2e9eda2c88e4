from math import nan
from pathlib import Path

import pytest

from bench.client.summary import NOTHING
from bench.peers import engine
from bench.peers.catalog import Peer
from bench.peers.engine import COUNTS, Case, compare, table


def test_table_has_the_ratio_and_a_dash_for_what_was_not_measured() -> None:
    text = table([["m, q4_0, avx2", "decode8", 130.0, 100.0, 1.3], ["m, q4_0, avx2", "prefill", 10.0, nan, nan]])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[2] == ["m, q4_0, avx2", "decode8", "130", "100", "1.30"]
    assert rows[3] == ["m, q4_0, avx2", "prefill", "10", NOTHING, NOTHING]


def test_scenarios_are_what_the_measuring_process_understands() -> None:
    from bench.micro.engine import MEASURES

    assert {words.split()[0] for words in COUNTS.values()} == set(MEASURES)


def test_only_the_file_of_a_case_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Large shapes have only quantized weights, so a case makes a single file."""
    made: list[str] = []

    def install(peer: Peer, root: Path, folder: Path) -> None:
        made.extend(word for command in peer.prepare(root, folder) for word in command)

    monkeypatch.setattr(engine, "install", install)
    monkeypatch.setattr(engine, "_llama_cpp", lambda case, scenarios: {"decode1": 1.0})
    folder = tmp_path / "llama-8b"
    [row] = compare(Case(tmp_path, folder, "q4_0", "avx2", False), ["decode1"], 1, "llama.cpp")
    assert row[:2] == ["llama-8b, q4_0, avx2", "decode1"]
    assert f"{folder}-q4_0.gguf" in made and not any("bf16" in word for word in made)
