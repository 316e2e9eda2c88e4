"""The README counts the lines of source."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_readme_counts_the_lines_of_source_within_five_percent() -> None:
    stated = re.search(r"about ([\d,]+) lines of Python and ([\d,]+) of C", (ROOT / "README.md").read_text())
    assert stated is not None
    folders = [ROOT / name for name in ("frontend", "worker", "shared", "deploy")]
    for number, endings in zip(stated.groups(), ((".py",), (".c", ".h")), strict=True):
        files = (file for folder in folders for file in folder.rglob("*") if file.suffix in endings)
        assert sum(len(file.read_text().splitlines()) for file in files) == pytest.approx(
            int(number.replace(",", "")), rel=0.05
        )
