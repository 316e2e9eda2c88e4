"""One part of a command, as a process: its files, its time limit, its outcome."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from bench.gpu.calls.parts import GRACE_S, Part
from bench.gpu.calls.state import CHECK_FAILED, CUT, DONE, FAILED, INCOMPLETE, Outcome
from bench.gpu.driver import TOOK_TOO_LONG

ROOT = Path(__file__).parents[3]
OUTPUT = "output.txt"
LEFT_OUT_NOTE = "left out"
NO_TESTS = 5  # pytest's exit code if it has selected no test
KILL_S = 5.0  # seconds that a process has to end after a signal


class PartProcess:
    """A part that runs. The part's files are in `folder`, where they replace the files of an earlier attempt."""

    def __init__(self, part: Part, folder: Path, device: str, models: tuple[str, ...], seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        self.part, self._folder, self._device = part, folder, device
        self._begun = time.monotonic()
        self._ends = self._begun + seconds
        command = part.command(folder, device, models, max(1.0, seconds - GRACE_S))
        with (folder / OUTPUT).open("wb") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | part.environment | {"HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def outcome(self) -> Outcome | None:
        """Returns how the part has ended, or None while it runs. Ends the process when its time is over."""
        code, seconds = self._process.poll(), time.monotonic() - self._begun
        if code is None and time.monotonic() < self._ends:
            return None
        self.end()
        if code is None:
            note = f"ended after {seconds:.0f} s"
            return Outcome(CUT, seconds=seconds, note=f"{note}: {last}" if (last := self._last_line()) else note)
        if self.part.sections:
            return _bench_outcome(self._folder, code, seconds, self._last_line())
        if code == NO_TESTS and self.part.tests and self._device == "cpu":
            return Outcome(DONE, seconds=seconds, note="these tests need a GPU")
        note = "" if code == 0 else f"ended with {code}: {self._last_line()}"
        return Outcome(DONE if code == 0 else FAILED, seconds=seconds, note=note)

    def end(self) -> None:
        """Ends the process and its children. The first signal lets pytest and the bench report what they have."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(KILL_S)
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_S)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_line(self) -> str:
        lines = (self._folder / OUTPUT).read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"


def _bench_outcome(folder: Path, code: int, seconds: float, last_line: str) -> Outcome:
    """Returns the outcome of a bench, read from its files: exit code 1 alone may mean a failed check or no measurement
    at all."""
    rows = folder / "rows.json"
    if code not in (0, 1) or not rows.exists():
        return Outcome(FAILED, seconds=seconds, note=f"ended with {code}: {last_line}")
    sections = json.loads(rows.read_text())["sections"]
    notes = [str(row.get("note", "")) for section in sections.values() for row in section["rows"]]
    if any(note.startswith(LEFT_OUT_NOTE) or TOOK_TOO_LONG in note for note in notes):
        return Outcome(INCOMPLETE, seconds=seconds, note="no time was left for some rows")
    return Outcome(CHECK_FAILED if code else DONE, seconds=seconds)


def python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]
