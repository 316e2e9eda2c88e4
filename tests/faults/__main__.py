"""`python -m tests.faults`: injects faults into a running server and prints what its clients received.

The exit code is 1 if any stream was lost or wrong, or any resource leaked.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.encoders import encoder
from tests.faults import batches, kept, vectors
from tests.faults.catalog import FAULTS
from tests.faults.fault import Fault
from tests.faults.soak import soak
from tests.faults.trial import Row, Size, table, trial

KEPT_TOKENS = 60  # of a kept answer
BATCH_TOKENS = 6  # of a line of a batch
KILLS, CLIENTS = 3, 6  # of a worker that computes vectors; and how many clients ask for them


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--fault", nargs="*", default=[], metavar="NAME", help=f"which faults to inject, from {', '.join(FAULTS)}"
    )
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of each fault")
    parser.add_argument("--streams", type=int, default=32, help="concurrent streams")
    parser.add_argument("--length", type=int, default=400, help="least tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--soak",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="instead: mixed load for this long, with a fault every 30 s",
    )
    parser.add_argument("--model", default="", help="instead of the toy, for faults of a whole `sluice serve`")
    parser.add_argument("--json", type=Path, help="write the figures and notes to this file")
    parser.add_argument(
        "--kept", nargs="*", metavar="NAME", help=f"instead: faults of kept answers, from {', '.join(kept.FAULTS)}"
    )
    parser.add_argument("--copies", type=int, default=4, help="kept answers of each kind and form")
    parser.add_argument(
        "--batch",
        type=int,
        default=0,
        metavar="LINES",
        help="instead: batches of so many lines, with --rounds kills of each kind at random lines",
    )
    parser.add_argument("--way", nargs="*", default=batches.WAYS, choices=batches.WAYS, help="of sending a batch")
    parser.add_argument(
        "--vectors", type=int, default=0, metavar="TEXTS",
        help="instead: kill -9 of the worker while clients ask --model, an encoder, for vectors of so many texts",
    )  # fmt: skip
    args = parser.parse_args()
    if args.batch:
        return _run_batches(args.model or "demo", args.batch, args.rounds, args.seed, args.way)
    if args.vectors:
        return _run_vectors(args.model, args.vectors)
    if args.kept is not None:
        if unknown := [name for name in args.kept if name not in kept.FAULTS]:
            parser.error(f"no such fault of kept answers: {', '.join(unknown)}")
        return _run_kept(args.kept or list(kept.FAULTS), args.copies)
    if unknown := [name for name in args.fault if name not in FAULTS]:
        parser.error(f"no such fault: {', '.join(unknown)}")
    faults = {name: FAULTS[name] for name in args.fault or FAULTS}
    if args.model:
        faults = {name: _serving(fault, args.model) for name, fault in faults.items() if fault.plan.is_whole}
    size = Size(args.streams, args.length, args.rounds, args.seed)
    rows = [_run_soak(args.soak, size)] if args.soak else [_run_fault(*row, size) for row in faults.items()]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([row.figures() | {"notes": row.notes} for row in rows], indent=1))
    return 0 if all(row.good for row in rows) else 1


def _run_kept(names: Sequence[str], copies: int) -> int:
    rows: list[kept.KeptRow] = []
    with tempfile.TemporaryDirectory(prefix="faults-model-") as folder:
        model = kept.write_model(Path(folder))
        for name in names:
            found = kept.trial(name, model, copies, KEPT_TOKENS)
            print(
                kept.table(found), *(note for row in found for note in row.notes), sep="\n", file=sys.stderr, flush=True
            )
            rows += found
    print(kept.table(rows), kept.summary(rows), sep="\n\n")
    return 0 if all(row.good for row in rows) else 1


def _run_batches(model: str, lines: int, rounds: int, seed: int, ways: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="faults-batch-") as folder:
        rows = batches.trial(model, Path(folder), lines, BATCH_TOKENS, rounds, seed, ways)
    print(*(note for row in rows for note in row.notes), sep="\n", file=sys.stderr, flush=True)
    print(kept.table(rows))
    return 0 if all(row.good for row in rows) else 1


def _run_vectors(model: str, count: int) -> int:
    with tempfile.TemporaryDirectory(prefix="faults-model-") as folder:
        row = vectors.drive(model or str(encoder(Path(folder) / "model")), count, kills=KILLS, clients=CLIENTS)
    print(*row.notes, sep="\n", file=sys.stderr)
    print(vectors.table(row))
    return 0 if row.good else 1


def _run_soak(seconds: float, size: Size) -> Row:
    row, measurements = soak(seconds, size)
    print(*measurements, *row.notes, sep="\n", file=sys.stderr, flush=True)
    return row


def _serving(fault: Fault, model: str) -> Fault:
    return replace(fault, plan=replace(fault.plan, model=model))


def _run_fault(name: str, fault: Fault, size: Size) -> Row:
    row = trial(name, fault, size)
    print(f"{name}: {'well' if row.good else 'BAD'}", *row.notes, sep="\n    ", file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
