"""Reads versions from requirements-frontend.txt, for tests of code that uses undocumented parts of a library."""

from pathlib import Path

PINNED = dict(
    line.split("==")
    for line in (Path(__file__).parents[1] / "requirements-frontend.txt").read_text().splitlines()
    if "==" in line
)
