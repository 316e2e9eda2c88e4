"""`sluice serve` whose workers wait in the middle of their answers for as long as a test wants them to.

The first argument is a file, the others are those of `sluice`. While the file is there, a worker computes nothing as
soon as one of its sequences has as many output tokens as the file says; it receives, refuses and aborts as always.
So a test that needs a stream to be under way does not depend on how fast the machine is.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAP_S = 0.01


@dataclass(frozen=True)
class Hold:
    """The test's side: `entry` is what serving() has to start."""

    file: Path

    @property
    def entry(self) -> tuple[str, ...]:
        return "-m", "tests.e2e.held", str(self.file)

    @contextmanager
    def at(self, tokens: int) -> Iterator[None]:
        """No sequence gets many more output tokens than these before the end of the `with`."""
        written = self.file.with_suffix(".new")
        written.write_text(str(tokens))
        written.rename(self.file)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self.file.unlink(missing_ok=True)


def serve(file: str, words: list[str]) -> int:
    import deploy.launch
    from deploy.cli import main

    plain = deploy.launch._command

    def command(role: str, *rest: Any) -> list[str]:
        words = plain(role, *rest)
        return [words[0], *Hold(Path(file)).entry, *words[words.index(role) :]] if role == "worker" else words

    deploy.launch._command = command  # type: ignore[assignment]
    return main(words)


def work(file: Path, words: list[str]) -> int:
    from deploy.cli import main
    from worker.schedule.plan import Plan
    from worker.schedule.scheduler import Scheduler

    plain = Scheduler.plan

    def held(scheduler: Scheduler) -> bool:
        try:
            most = int(file.read_text())
        except FileNotFoundError:
            return False
        return any(sequence.output_len >= most for sequence in scheduler._state.running)

    def plan(self: Any, now: float) -> Plan:
        if not held(self):
            return plain(self, now)
        time.sleep(NAP_S)
        return Plan()

    Scheduler.plan = plan  # type: ignore[method-assign]
    return main(words)


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    sys.exit(work(Path(file), words) if words[0] == "worker" else serve(file, words))
