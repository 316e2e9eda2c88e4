"""`python -m bench.gpu`: the same as `sluice bench gpu`."""

import sys

from bench.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["gpu", *sys.argv[1:]]))
