"""Finds and runs the code blocks of pages (```sh run, ```python run), and compares their output (```text shown).

A `shown` block belongs to the `run` block before it; `…` in it stands for any text. The examples use a server at
127.0.0.1:8000 that serves the default model (README.md) or `demo` (other pages); the caller replaces the address.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
HOME = "127.0.0.1:8000"

# Runs the sources from standard input one after another, each in its own namespace, and prints their outputs.
RUNNER = """
import contextlib, io, json, sys, traceback
outputs = []
for source in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(source, "<docs>", "exec"), {"__name__": "__main__"})
            failed = ""
        except BaseException:
            failed = traceback.format_exc()
    outputs.append([out.getvalue(), failed])
json.dump(outputs, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. `place` names the page and the line."""

    place: str
    language: str
    source: str
    shown: str | None = None


@dataclass(frozen=True, slots=True)
class Printed:
    """The output of a block. `failed` explains a failure and is empty otherwise."""

    text: str
    failed: str


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(), list[Block]()
    for fence in FENCE.finditer(text):
        language, _, mark = fence["info"].partition(" ")
        place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, fence.start()) + 1}"
        match mark:
            case "run":
                found.append(Block(place, language, fence["body"]))
            case "shown":
                found[-1] = replace(found[-1], shown=fence["body"])
            case "":
                pass
            case _:
                raise ValueError(f"{place}: ```{fence['info']}")
    return found


def run_python(sources: Sequence[str], folder: Path) -> list[Printed]:
    """Runs all sources in one process, because imports take most of the time."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(sources), capture_output=True, text=True, timeout=PATIENCE_S,
        cwd=folder, env=environment(folder),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Printed(*output) for output in json.loads(done.stdout)]


def run_sh(source: str, folder: Path) -> Printed:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", source], capture_output=True, text=True, timeout=PATIENCE_S,
        cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return Printed(done.stdout, done.stderr + f"exit code {done.returncode}" if done.returncode else "")


def environment(folder: Path) -> dict[str, str]:
    """An environment with `sluice` and `python` on the path and without Sluice's own variables."""
    command = folder / "bin" / "sluice"
    if not command.exists():
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deploy.cli.main "$@"\n')
        command.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**inherited, "PATH": path, "PYTHONPATH": str(ROOT)}


def matches(shown: str, printed: str) -> bool:
    """Whether the printed text matches the shown text, in which `…` stands for any text."""
    pattern = ".*".join(map(re.escape, shown.strip().split("…")))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None
