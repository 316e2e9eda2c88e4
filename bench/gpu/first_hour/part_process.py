"""Runs one part in a process: its files, its time limit, its outcome."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from bench.gpu.first_hour.parts import GRACE_S, Part
from bench.gpu.first_hour.state import CHECK_FAILED, CUT, DONE, FAILED, INCOMPLETE, Outcome

ROOT = Path(__file__).parents[3]
OUTPUT = "output.txt"
LEFT_OUT_NOTE = "left out"
NO_TESTS = 5  # pytest's exit code if it has selected no test


def run(part: Part, folder: Path, device: str, models: tuple[str, ...], seconds: float) -> Outcome:
    """Runs a part for at most `seconds`. The part's files are in `folder`, where they replace the files of an earlier
    attempt. KeyboardInterrupt also ends the process, and is raised again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    command = [sys.executable, "-m", *part.command(folder, device, models, max(1.0, seconds - GRACE_S))]
    begun = time.monotonic()
    with (folder / OUTPUT).open("wb") as output:
        environment = os.environ | part.environment | {"HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        code = _wait(process, seconds)
    if code == NO_TESTS and part.module == "pytest" and device == "cpu":
        return Outcome(DONE, seconds=time.monotonic() - begun, note="these tests need a GPU")
    return _outcome(part, folder, code, time.monotonic() - begun)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Returns the exit code, or None if the process had to be ended."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # also ends child processes that this process left behind
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def _outcome(part: Part, folder: Path, code: int | None, seconds: float) -> Outcome:
    if code is None:
        return Outcome(CUT, seconds=seconds, note=f"ended after {seconds:.0f} s")
    if part.sections:
        return _bench_outcome(folder, code, seconds)
    return Outcome(DONE if code == 0 else FAILED, seconds=seconds, note="" if code == 0 else _last_line(folder, code))


def _bench_outcome(folder: Path, code: int, seconds: float) -> Outcome:
    """Returns the outcome of a bench, read from its files: exit code 1 alone may mean a failed check or no measurement
    at all."""
    rows = folder / "rows.json"
    if code not in (0, 1) or not rows.exists():
        return Outcome(FAILED, seconds=seconds, note=_last_line(folder, code))
    sections = json.loads(rows.read_text())["sections"]
    notes = [str(row.get("note", "")) for section in sections.values() for row in section["rows"]]
    if any(note.startswith(LEFT_OUT_NOTE) for note in notes):
        return Outcome(INCOMPLETE, seconds=seconds, note="no time was left for some rows")
    return Outcome(CHECK_FAILED if code else DONE, seconds=seconds)


def _last_line(folder: Path, code: int) -> str:
    lines = (folder / OUTPUT).read_text(errors="replace").strip().splitlines()
    return f"ended with {code}: {lines[-1][:300] if lines else 'no output'}"
