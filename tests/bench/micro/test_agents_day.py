"""`python -m bench.micro.agents_day` counts the prompt tokens of a day of agents, on the demo model."""

from pathlib import Path

import pytest

import deploy.demo
from bench.micro.agents_day import main

DEMO = Path(deploy.demo.__file__).parent / "model"
DAY = "--agents 2 --turns 4 --restarts 1 --shared 600 --result 60 --answer 2 --kv-cache-gb 0.05"


def test_a_restart_costs_the_beginnings_unless_a_store_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(DEMO), *DAY.split()]) == 0
    heading, rule, row = capsys.readouterr().out.splitlines()
    assert heading.count("|") == rule.count("|") == row.count("|")
    cells = [cell.strip().replace(",", "") for cell in row.split("|")[1:-1]]
    pool, sent, without, stored, fetched = (int(cells[at]) for at in (0, 1, 2, 3, 5))
    ratio, megabytes = float(cells[4]), int(cells[6])
    assert pool > 2000 and stored < without < sent and megabytes >= 0
    assert without - stored == fetched >= 256, "what was not computed came from the store"
    assert ratio == round(without / stored, 2)
