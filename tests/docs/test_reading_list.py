"""The reading list of docs/architecture.md: its files exist, and their number and length are as stated."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
MOST_FILES, MOST_LINES = 35, 6_500


def test_reading_list_has_the_files_and_lines_that_the_page_states() -> None:
    section = PAGE.split("## Reading it in an afternoon")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    files = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[2])]
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    stated = re.search(r"These are (\d+) files and ([\d,]+) lines", section)
    assert stated is not None
    assert (str(len(files)), f"{lines:,}") == stated.groups()
    assert len(files) <= MOST_FILES and lines <= MOST_LINES and len(set(files)) == len(files)


def test_readme_counts_the_lines_of_source_within_five_percent() -> None:
    stated = re.search(r"about ([\d,]+) lines of Python and ([\d,]+) of C", (ROOT / "README.md").read_text())
    assert stated is not None
    folders = [ROOT / name for name in ("frontend", "worker", "shared", "deploy")]
    for number, endings in zip(stated.groups(), ((".py",), (".c", ".h")), strict=True):
        files = (file for folder in folders for file in folder.rglob("*") if file.suffix in endings)
        assert sum(len(file.read_text().splitlines()) for file in files) == pytest.approx(
            int(number.replace(",", "")), rel=0.05
        )
