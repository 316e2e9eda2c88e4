"""Repeats with a real model what other tests check with random weights and a toy; prints a Markdown table.

Greedy answers are compared with transformers, structured output with its JSON schema, text with `tokenizers`. Answers
that are verified, scored, replayed or continued after a restart must have the same bytes as at first. The model is
SmolLM2-135M-Instruct in Q4_1 (98 MB): SLUICE_TEST_REAL_MODEL names the file. The exit code is 1 if anything is wrong.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import torch

from tests.e2e.server import Server, serving
from tests.real import answers, context, detokenizing, matrix, promises, structured
from tests.real.model import real_model
from tests.real.questions import TURNS, questions
from tests.real.reference import Reference
from tests.real.report import Row, table
from tests.worker.matrix import DRAFTING_MODES, DRAFTING_PAIRS, HALVES, MODES


class Bench:
    """The servers that the parts share. A server is started when a part first needs it."""

    def __init__(self, file: Path, stack: ExitStack, scale: float) -> None:
        self.file, self._stack, self._scale = file, stack, scale
        self.reference = Reference(file)
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.record = self._folder / "record"

    def count(self, whole: int) -> int:
        return max(1, round(whole * self._scale))

    @cached_property
    def server(self) -> Server:
        """A server in bfloat16 with drafts, which can be held."""
        return self._serving("server", "--dtype", "bfloat16", "--speculation", "ngram", held=True)

    @cached_property
    def plain(self) -> Server:
        """A server in bfloat16 without drafts, which records requests."""
        recording = ("--record", str(self.record), "--record-text")
        return self._serving("plain", "--dtype", "bfloat16", "--speculation", "off", *recording)

    @cached_property
    def exact(self) -> Server:
        return self._serving("exact", "--dtype", "float32")

    def _serving(self, name: str, *flags: str, held: bool = False) -> Server:
        return self._stack.enter_context(serving(self.file, self._folder / name, *flags, held=held))


def _answers(bench: Bench) -> Iterator[Row]:
    asked = questions()[:: round(1 / min(1.0, bench.count(100) / 100))]
    yield answers.check(bench.exact, bench.reference, "float32", asked, bench.count(len(TURNS)))
    yield answers.check(bench.server, bench.reference, "bfloat16", asked, bench.count(len(TURNS)))


def _structured(bench: Bench) -> Iterator[Row]:
    yield from structured.check(bench.server, bench.count(1000), bench.count(100))


def _text(bench: Bench) -> Iterator[Row]:
    yield from detokenizing.check(bench.server, bench.reference, bench.count(1000))


def _context(bench: Bench) -> Iterator[Row]:
    yield context.check_end(bench.server)
    yield context.check_bytes(bench.server, bench.plain)


def _promises(bench: Bench) -> Iterator[Row]:
    yield promises.check_receipts(bench.server, bench.count(20))
    yield promises.check_scores(bench.server, bench.count(20))
    yield promises.check_replay(bench.plain, bench.record, bench.server, bench.count(20))


def _matrix(bench: Bench) -> Iterator[Row]:
    thorough = [*MODES, *DRAFTING_MODES]
    yield matrix.check(bench.file, torch.bfloat16, thorough[:: -(-len(thorough) // bench.count(len(thorough)))])
    half = [*HALVES[0], *DRAFTING_PAIRS]
    yield matrix.check(bench.file, torch.float32, half[:: -(-len(half) // bench.count(len(half)))])


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "answers": _answers, "structured": _structured, "text": _text, "context": _context, "promises": _promises,
    "matrix": _matrix,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.real", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the questions and inputs (default: 1)")
    asked = parser.parse_args()
    file = real_model()
    if file is None:
        parser.error("the model is not on this machine: SLUICE_TEST_REAL_MODEL names its file")
    torch.set_num_threads(1)
    rows: list[Row] = []
    with ExitStack() as stack:
        bench = Bench(file, stack, asked.scale)
        for name in asked.only or PARTS:
            began = time.monotonic()
            for row in PARTS[name](bench):
                rows.append(row)
                said = f"{row.check}: {'well' if not row.wrong else 'WRONG'} after {time.monotonic() - began:.0f} s"
                print(said, *row.wrong, *row.notes, sep="\n    ", file=sys.stderr, flush=True)
    print(table(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
