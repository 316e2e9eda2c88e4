"""The base of all fuzzers: inputs that a seed decides, counts of results, and a file for each input that fails.

A fuzzer makes an input from a random generator and attempts it. Input number `i` depends only on the seed, the name of
the fuzzer and `i`, and not on the number of inputs that fit into the time.
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
ATTEMPTS = 3  # an input counts as a hang if all these attempts are slow, because a busy machine is slow at times
Input = dict[str, Any]  # a JSON object; bytes are texts in Latin-1
Attempt = Callable[[Input], None]


class Failure(Exception):
    """An answer is wrong: it is not HTTP, has an undocumented status of 500 or more, or has unexpected bytes."""


@dataclass
class Counts:
    """The numbers of inputs that a fuzzer tried, by result. statuses: how often each status came, for information"""

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
    """`make(random)` makes an input; `opened(watch)` is a context manager for a function that attempts an input.

    An attempt raises Failure, or TimeoutError if no answer came within about `patience_s`.
    """

    name: str
    make: Callable[[random.Random], Input]
    opened: Callable[[Watch], AbstractContextManager[Attempt]]
    patience_s: float = HANG_S  # limit for the answer to the input; other clients must never wait longer than HANG_S

    def __call__(self, seed: str, seconds: float, watch: Watch, findings: Path) -> Counts:
        """Attempts inputs for `seconds`, at least one. Writes inputs that fail to the folder `findings`."""
        counts, end = Counts(), time.monotonic() + seconds
        with self.opened(watch) as attempt:
            while counts.inputs == 0 or time.monotonic() < end:  # opening may take longer than `seconds`
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
        """Attempts an input. Returns None, or what is wrong: the name of a field of Counts, and a text."""
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
        """Attempts the input in a file again."""
        with self.opened(watch) as attempt:
            return self.judge(attempt, input, watch)
