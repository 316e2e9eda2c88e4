"""The part `sanitizer`: runs GPU tests under compute-sanitizer, which reports accesses out of bounds.

python -m bench.gpu.calls.sanitizer TEST...
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench.gpu.calls.parts import PYTEST

NAME, USUAL = "compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"


def main(tests: Sequence[str]) -> int:
    tool = shutil.which(NAME) or shutil.which(USUAL)
    if tool is None:
        print(f"{NAME} is not installed, so nothing was checked")
        return 1
    check = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    return subprocess.run([*check, sys.executable, "-m", "pytest", *PYTEST, *tests]).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
