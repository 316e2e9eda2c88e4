"""Checks that each bug of another server that docs/bugs-elsewhere.md lists has a test that exists."""

import ast
import re
from functools import cache

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs/bugs-elsewhere.md"
HEAD = "| Report | What went wrong there | What Sluice does | Test |"
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>test_\w+)`")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line != HEAD]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@cache
def names_in(file: str) -> set[str]:
    path = ROOT / file
    parsed = ast.parse(path.read_text() if path.is_file() else "")
    return {one.name for one in ast.walk(parsed) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_bug_elsewhere_has_a_test_here() -> None:
    assert len(rows()) >= 50
    for row in rows():
        assert len(row) == 4 and all(row), row
        found = TEST.fullmatch(row[3])
        assert found and found["name"] in names_in(found["file"]), row


def test_reports_of_bugs_elsewhere_are_named_once_and_have_a_number() -> None:
    reports = [row[0] for row in rows()]
    assert len(set(reports)) == len(reports)
    assert [one for one in reports if "#" not in one and "(no number)" not in one] == []
