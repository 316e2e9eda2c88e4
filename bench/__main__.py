"""`sluice bench`: speed, measured from outside. Every report names its command; tests live elsewhere."""

import argparse
from pathlib import Path

from bench.quick import quick


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sluice bench", description=__doc__)
    parser.add_argument(
        "--models", default="demo,qwen3-0.6b", help="demo, or shapes of bench/checkpoints.py (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    args = parser.parse_args(argv)
    print(quick(args.models.split(","), args.json))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
