"""`python -m bench.micro.kv_store` compares steps with and without a store that writes, on the demo model."""

from pathlib import Path

import pytest

import deploy.demo
from bench.micro.kv_store import HEADINGS, main

DEMO = Path(deploy.demo.__file__).parent / "model"


def test_every_writing_window_writes_a_file_and_no_other_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--sequences 32 --pairs 4 --prompts 1 --kv-cache-gb 0.1 --threads 1"
    assert main(["--model", str(DEMO), *words.split()]) == 0
    heading, _, *rows = capsys.readouterr().out.splitlines()
    names = [cell.strip() for cell in heading.split("|")[1:-1]]
    assert tuple(names) == HEADINGS
    decode, prompt = (dict(zip(names, (cell.strip() for cell in row.split("|")[1:-1]), strict=True)) for row in rows)
    assert decode["files"] == "6" and prompt["files"] == "2", "one for each pair, those that warm up included"
    assert int(decode["MB"]) >= 0 and float(decode["time"].split()[0]) > 0
