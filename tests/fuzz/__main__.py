"""Fuzzes a server of the demo model, or of another one, for some minutes, and prints the results as a Markdown table.

The kinds of input share the time by their weights, in rounds. The same seed makes the same inputs in the same order.
Each input that fails is written to a file, from which --replay sends it again. The exit code is 1 if a process died, an
answer was wrong, an answer to this or another client took more than two seconds, or memory grew beyond its limit.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.server import serving
from tests.fuzz import wide_model
from tests.fuzz.fuzzer import Counts
from tests.fuzz.kinds import KINDS, Kind, patient
from tests.fuzz.watch import Watch, watching

ROUNDS = 10  # at most; after the first round, which fills all caches, memory hardly grows
ROUND_S = 60.0
ANSWER_S = 60.0  # of another model than the demo: an input may ask for 12,800 tokens, which the demo makes in 2 s
# a pool so small that the first round writes all its pages, which then count as memory
SMALL_POOL = ("--kv-cache-gb", "0.05")

# MiB that resident memory may grow after the first round. A worker keeps up to 64 compiled grammars, about twenty times
# as large as their 4 MiB of text; a frontend keeps only texts. If each input left 1 KB behind, memory would exceed the
# limits of frontends and workers within an hour. The launcher never sees the inputs.
GROWTH = {"frontend": 48.0, "worker": 128.0, "launcher": 4.0}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=1.0, help="how long, in all (default: 1)")
    parser.add_argument("--seed", default="1", help="what decides the inputs (default: 1)")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], action="append", help="only this kind")
    parser.add_argument("--findings", type=Path, help="folder for inputs that fail (default: a temporary one)")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="attempt the input of this file again, and no other"
    )
    parser.add_argument("--model", default="demo", help="what the server serves, or `wide`: a vocabulary of 152,000")
    asked = parser.parse_args()
    known = KINDS if asked.model == "demo" else [patient(kind, ANSWER_S) for kind in KINDS]
    kinds = [kind for kind in known if not asked.only or kind.name in asked.only]
    findings = asked.findings or Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    findings.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = wide_model.save(folder / "wide") if asked.model == "wide" else asked.model
        server = stack.enter_context(serving(model, folder / "log", *SMALL_POOL))
        with watching(server) as watch:
            if asked.replay:
                return replay(asked.replay, known, watch)
            code = fuzz(kinds, asked.seed, asked.minutes * 60, watch, findings)
        server.until_idle()
    return code


def replay(file: Path, kinds: Sequence[Kind], watch: Watch) -> int:
    saved = json.loads(file.read_text())
    (kind,) = [kind for kind in kinds if kind.name == saved["kind"]]
    trouble = kind.fuzzer.replay(saved["input"], watch)
    print(": ".join(trouble) if trouble else "it passes")
    return 1 if trouble else 0


def fuzz(kinds: list[Kind], seed: str, seconds: float, watch: Watch, findings: Path) -> int:
    """Fuzzes all kinds in turn for `seconds`, and prints the table. Returns the exit code."""
    counts = {kind.name: Counts() for kind in kinds}
    total, before = sum(kind.weight for kind in kinds), watch.memory()
    rounds = max(2, min(ROUNDS, int(seconds / ROUND_S)))
    end = time.monotonic() + seconds
    for number in range(rounds):
        # time lost in failures shortens all remaining rounds alike
        left = max(0.0, end - time.monotonic()) / (rounds - number)
        for kind in kinds:
            share = left * kind.weight / total
            counts[kind.name].add(kind.fuzzer(f"{seed}/{number}", share, watch, findings))
        sizes = ", ".join(f"{role} {size:.0f} MiB" for role, size in watch.memory().items())
        print(f"round {number + 1} of {rounds}, {time.strftime('%H:%M:%S')}: {sizes}", file=sys.stderr, flush=True)
        if number == 0:
            before = watch.memory()
    after = watch.memory()
    growth = {role: after[role] - before[role] for role in GROWTH}
    print(table(counts, growth, watch.stalls))
    beyond = [role for role in GROWTH if growth[role] > GROWTH[role]]
    return 1 if beyond or any(count.found for count in counts.values()) else 0


def table(counts: dict[str, Counts], growth: dict[str, float], stalls: int) -> str:
    """The results as two Markdown tables."""
    lines = ["| kind | inputs | crashes | wrong answers | hangs |", "| --- | --: | --: | --: | --: |"]
    for name, count in counts.items():
        lines.append(f"| {name} | {count.inputs} | {count.crashes} | {count.failures} | {count.hangs} |")
    lines += ["", "| process | memory grew by, MiB | limit |", "| --- | --: | --: |"]
    lines += [f"| {role} | {growth[role]:.1f} | {GROWTH[role]:.0f} |" for role in GROWTH]
    lines += ["", f"Tiny requests of others that took more than 2 s, also ones that no input repeats: {stalls}."]
    lines += [f"Input that failed: {file}" for count in counts.values() for file in count.files]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
