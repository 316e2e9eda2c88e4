"""Runs pytest with a C library that is compiled with AddressSanitizer.

The sanitizer's runtime has to be loaded before Python. Torch's tensors then lie between guarded bytes, too. A read or
write beyond an array on the stack, or beyond a tensor, ends the process with a report and the exit code FAULT.
"""

import os
import subprocess
import sys
from datetime import date
from itertools import product
from pathlib import Path

import pytest

from worker.ops import native as limits
from worker.ops.native_build import VARIABLE

FAULT = 99
SANITIZE = ("-fsanitize=address", "-O1", "-g1", "-fno-omit-frame-pointer")
LIBRARY, BEYOND, ONLY = "SLUICE_SANITIZED_LIBRARY", "SLUICE_SANITIZED_BEYOND", "SLUICE_SANITIZED_ONLY"


def tier_of(day: date) -> str:
    """Returns the instruction set of HERE that is examined on a day; another one two days later, see TURNS."""
    from tests.worker.ops.harness.cpu_tiers import EMULATED, HERE

    real = [one for one in HERE if one != EMULATED]
    return real[day.toordinal() // 2 % len(real)]


def compiled(folder: Path, tier: str) -> Path:
    """Compiles the C library with AddressSanitizer into a folder, for one instruction set."""
    from worker.ops import native_build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build, "COMMON", (*native_build.COMMON, *SANITIZE))
        return native_build._compile(
            os.environ.get("CC", "gcc"), folder, native_build.units_of(native_build.USES[tier])
        )


def run(library: Path, tier: str, *arguments: str, beyond: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs pytest with a library that is compiled for an instruction set.

    beyond: the name of a limit that is raised by one, in code and tests
    """
    named = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {"LD_PRELOAD": named.stdout.strip(), "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FAULT}"}
    command = [sys.executable, "-m", __name__, "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True,
        env=os.environ | environment | {LIBRARY: str(library), BEYOND: beyond, VARIABLE: tier, ONLY: tier},
    )  # fmt: skip


def main() -> int:
    if name := os.environ[BEYOND]:  # raised before other modules copy the limit
        setattr(limits, name, getattr(limits, name) + 1)
    from worker.ops import native as library

    library.built = lambda: Path(os.environ[LIBRARY])
    from tests.worker.ops.harness import cpu_tiers

    cpu_tiers.HERE[:] = [os.environ[ONLY]]
    cpu_tiers.FUNCTIONS["tier, dtype"] = list(product(cpu_tiers.HERE, cpu_tiers.DTYPES))
    return pytest.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
