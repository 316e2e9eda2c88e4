"""`python -m bench.micro.load` measures loads of a real model: the demo model."""

from pathlib import Path

import pytest

import deploy.demo
from bench.micro.load import COLUMNS, HERE, main

DEMO = Path(deploy.demo.__file__).parent / "model"


def test_loads_of_two_checkouts_alternate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(DEMO), "--rounds", "1", "--against", str(HERE)]) == 0
    heading, rule, *rows = capsys.readouterr().out.splitlines()
    assert heading.count("|") == rule.count("|") == len(COLUMNS) + 2
    assert [row.split("|")[1].strip() for row in rows] == ["other", "this"]
    for row in rows:
        seconds, user, _, faults, peak, after, huge, _ = (float(cell.replace(",", "")) for cell in row.split("|")[2:-1])
        assert seconds > 0 and user >= 0 and faults > 0 and peak >= after > huge >= 0


def test_a_file_that_is_missing_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "none.gguf"), "--rounds", "1"]) == 1
    said = capsys.readouterr().err
    assert "none.gguf was not loaded" in said and "Error" in said and len(said.splitlines()) == 1
