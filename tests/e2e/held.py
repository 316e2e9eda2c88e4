"""`sluice serve` whose workers wait in the middle of their answers for as long as a test wants them to.

The first argument is a file, further arguments go to `sluice`. The file holds a number of output tokens and optionally
the seconds that a step should last. While the file exists, a worker stops computing when one of its sequences has that
many output tokens, or computes slowly if a duration is given; it still receives, refuses and aborts requests. So a test
that needs a running stream does not depend on the speed of the machine.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

NAP_S = 0.01


@dataclass(frozen=True)
class Hold:
    """Holds workers from within a test. entry: arguments for Python that start a worker that can be held"""

    file: Path

    @property
    def entry(self) -> tuple[str, ...]:
        return "-m", "tests.e2e.held", str(self.file)

    def command(self, plain: Callable[..., list[str]]) -> Callable[..., list[str]]:
        """Wraps `plain`, which returns the command of a child process, so that workers can be held."""

        def command(role: str, *rest: Any) -> list[str]:
            words = plain(role, *rest)
            return [words[0], *self.entry, *words[words.index(role) :]] if role == "worker" else words

        return command

    @contextmanager
    def at(self, tokens: int, step_s: float | None = None) -> Iterator[None]:
        """Holds a worker as soon as one of its sequences has `tokens` output tokens.

        It is held until release() or the end of the `with`. With `step_s`, it is only slowed down: each further step
        takes at least `step_s` seconds.
        """
        self.reached.unlink(missing_ok=True)
        written = self.file.with_suffix(".new")
        written.write_text(f"{tokens} {step_s or ''}")
        written.rename(self.file)
        try:
            yield
        finally:
            self.release()

    def wait(self) -> None:
        """Waits until a worker is held."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.reached.exists():
            assert time.monotonic() < deadline, "nothing came so far as to be held"
            time.sleep(NAP_S)

    def release(self) -> None:
        self.file.unlink(missing_ok=True)

    @property
    def flip(self) -> Path:
        """The file by which a test breaks another rank of the worker; see broken_rank.py."""
        return self.file.with_suffix(".flip")

    @property
    def reached(self) -> Path:
        return self.file.with_suffix(".reached")


def serve(hold: Hold, words: list[str]) -> int:
    from deploy.cli.main import main
    from deploy.launcher import child_command

    child_command.command_line = hold.command(child_command.command_line)
    return main(words)


def work(hold: Hold, words: list[str]) -> int:
    from deploy.cli.main import main
    from worker.distributed import leader

    make_holdable(hold)
    leader.FOLLOWER = ("-m", "tests.e2e.broken_rank", str(hold.flip))
    return main(words)


def make_holdable(hold: Hold) -> None:
    """Patches this process, which is a worker, so that a test can hold it."""
    from worker.scheduler.scheduler import Scheduler
    from worker.scheduler.sequence import Plan

    plain = Scheduler.plan

    def plan(self: Any, now: float) -> Plan:
        try:
            most, *step_s = hold.file.read_text().split()
        except FileNotFoundError:
            return plain(self, now)
        if all(sequence.output_len < int(most) for sequence in self.sequences()):
            return plain(self, now)
        hold.reached.touch()
        time.sleep(float(step_s[0]) if step_s else NAP_S)
        return plain(self, now) if step_s else Plan()

    Scheduler.plan = plan  # type: ignore[method-assign]


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    sys.exit((work if words[0] == "worker" else serve)(Hold(Path(file)), words))
