"""`python -m tests.faults`: breaks a server in every way, and prints what its clients were told.

Exit code 1 when anything was lost, wrong or leaked.
"""

import argparse
import json
import sys
from pathlib import Path

from tests.faults.faults import FAULTS
from tests.faults.soak import soak
from tests.faults.trial import Row, Size, table, trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--fault", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=1, help="how often each")
    parser.add_argument("--streams", type=int, default=32, help="in flight at a time")
    parser.add_argument("--length", type=int, default=400, help="fewest tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS", help="mixed load, a fault every 30 s")
    parser.add_argument("--json", type=Path, help="the figures and all that was noted go here, too")
    args = parser.parse_args()
    if unknown := [name for name in args.fault if name not in FAULTS]:
        parser.error(f"no such fault: {', '.join(unknown)}")
    size = Size(args.streams, args.length, args.rounds, args.seed)
    rows = [_soaked(args.soak, size)] if args.soak else [_told(name, size) for name in args.fault or FAULTS]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([row.figures() | {"notes": row.notes} for row in rows], indent=1))
    return 0 if all(row.good for row in rows) else 1


def _soaked(seconds: float, size: Size) -> Row:
    row, told = soak(seconds, size)
    print(*told, *row.notes, sep="\n", file=sys.stderr, flush=True)
    return row


def _told(name: str, size: Size) -> Row:
    row = trial(name, FAULTS[name], size)
    print(f"{name}: {'well' if row.good else 'BAD'}", *row.notes, sep="\n    ", file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
