"""`sluice serve` with faults in its worker.

A test triggers a fault by making a file in a folder, which is the first argument.

    hang     the compute loop blocks     broken   every step raises, as on a lost device
    poison   (always on) a step with a prompt that begins with POISON kills the process
    slow     (always on) the first worker loads slowly

A file holds the epoch of the worker that gets the fault. All further arguments are passed to `sluice`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

POISON = [101, 102, 103, 104, 105, 106, 107]
HERE = str(Path(__file__))
HOLD = "log.hold"  # the file that holds workers (tests/e2e/held.py), beside the log of serving()


def serve(folder: str, words: list[str]) -> int:
    from deploy.cli.main import main
    from deploy.launcher import child_command

    plain = child_command.command_line

    def command(role: str, *rest: Any) -> list[str]:
        words = plain(role, *rest)
        return [words[0], HERE, folder, *words[words.index(role) :]] if role == "worker" else words

    child_command.command_line = command
    return main(words)


def work(folder: Path, words: list[str]) -> int:
    import worker.__main__
    from deploy.cli.main import main
    from tests.e2e.held import Hold, make_holdable
    from worker.engine.loop import Loop
    from worker.model_runner.runner import Runner

    make_holdable(Hold(folder / HOLD))

    def has_fault(fault: str) -> bool:
        file = folder / fault
        return file.exists() and file.read_text() == os.environ["SLUICE_EPOCH"]

    turn, launch, load = Loop.iterate, Runner.launch, worker.__main__.load_engine

    def faulty_turn(self: Any) -> bool:
        while has_fault("hang"):
            time.sleep(0.01)
        return turn(self)

    def faulty_launch(self: Any, plan: Any, before: Any = None) -> Any:
        if any(chunk.sequence.tokens[: len(POISON)] == POISON for chunk in plan.chunks):
            time.sleep(0.1)  # so that the frontend learns of the admission, and retries the request elsewhere
            os.abort()
        if has_fault("broken"):
            raise RuntimeError("device lost")
        time.sleep(0.002)
        return launch(self, plan, before)

    def slow_load(model: Any, settings: Any, progress: Any, *more: Any, **known: Any) -> Any:
        for done in range(10 if os.environ["SLUICE_EPOCH"] == "1" else 0):
            progress(done, 10)
            time.sleep(0.3)
        # drops the real progress, which would start at 0 again
        return load(model, settings, lambda *_: None, *more, **known)

    Loop.iterate, Runner.launch, worker.__main__.load_engine = faulty_turn, faulty_launch, slow_load  # type: ignore[method-assign]
    return main(words)


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    sys.exit(work(Path(folder), words) if words[0] == "worker" else serve(folder, words))
