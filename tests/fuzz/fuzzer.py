"""What all fuzzers share: inputs that a seed decides, counts, and a file for each input that fails.

A fuzzer makes an input from a random generator and attempts it. Input number `i` depends only on the seed, the name of
the fuzzer and `i`; how many inputs fit the time does not change any of them.
"""

import json
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.watch import Watch

HANG_S = 2.0
ATTEMPTS = 3  # an input hangs if each of so many attempts is slow: a busy machine is slow now and then
Input = dict[str, Any]  # JSON; bytes as text in Latin-1
Attempt = Callable[[Input], None]


class Failure(Exception):
    """An answer which is wrong: no HTTP, a status from 500 on which is not documented, or other bytes."""


@dataclass
class Counts:
    """What a fuzzer tried and found. `statuses`: how often each kind of answer came, for information."""

    inputs: int = 0
    crashes: int = 0
    failures: int = 0
    hangs: int = 0
    files: list[Path] = field(default_factory=list)

    @property
    def found(self) -> int:
        return self.crashes + self.failures + self.hangs

    def add(self, other: "Counts") -> None:
        self.inputs += other.inputs
        self.crashes += other.crashes
        self.failures += other.failures
        self.hangs += other.hangs
        self.files += other.files


@dataclass(frozen=True)
class Fuzzer:
    """`make(random)` makes an input; `opened(watch)` gives, for the length of a `with`, a function which attempts one.

    An attempt raises Failure, or TimeoutError if no answer came in `patience_s` or somewhat later.
    """

    name: str
    make: Callable[[random.Random], Input]
    opened: Callable[[Watch], AbstractContextManager[Attempt]]
    patience_s: float = HANG_S  # for the input's own answer; others never wait longer than HANG_S

    def __call__(self, seed: str, seconds: float, watch: Watch, findings: Path) -> Counts:
        """Attempts inputs for `seconds`, at least one; writes those that fail to the folder `findings`."""
        counts, end = Counts(), time.monotonic() + seconds
        with self.opened(watch) as attempt:
            while counts.inputs == 0 or time.monotonic() < end:  # to open it may take longer than that
                number = counts.inputs
                input = self.make(random.Random(f"{seed}/{self.name}/{number}"))
                counts.inputs += 1
                if trouble := self.judge(attempt, input, watch):
                    kind, why = trouble
                    setattr(counts, kind, getattr(counts, kind) + 1)
                    file = findings / f"{self.name}-{seed.replace('/', '.')}-{number}.json"
                    found = {"kind": self.name, "seed": seed, "number": number, "found": kind, "why": why}
                    file.write_text(json.dumps({**found, "input": input}, indent=1))
                    counts.files.append(file)
                    print(f"{self.name} {number}: {kind}: {why[:300]} ({file})", flush=True)
        return counts

    def judge(self, attempt: Attempt, input: Input, watch: Watch) -> tuple[str, str] | None:
        """Attempts an input; returns what is wrong, as a field of Counts and a text, or None."""
        for _ in range(ATTEMPTS):
            failure, slow, begun = "", "", time.monotonic()
            stalls = watch.stalls
            try:
                attempt(input)
            except TimeoutError as error:
                slow = f"no answer: {error}"
            except Failure as error:
                failure = str(error)
            took = time.monotonic() - begun
            slow = slow or (f"{took:.1f} s" if took > self.patience_s else "") or watch.stalled_since(stalls)
            if died := watch.died():
                return "crashes", died
            if failure:
                return "failures", failure
            if not slow:
                return None
        return "hangs", slow

    def replay(self, input: Input, watch: Watch) -> tuple[str, str] | None:
        """Attempts an input of a file again."""
        with self.opened(watch) as attempt:
            return self.judge(attempt, input, watch)
