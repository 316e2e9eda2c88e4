"""Runs pytest with a C library that is compiled with AddressSanitizer.

The sanitizer's runtime has to be loaded before Python. Torch's tensors then lie between guarded bytes, too. A read or
write beyond an array on the stack, or beyond a tensor, ends the process with a report and the exit code FAULT.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.ops import native as limits
from worker.ops.native_build import sets_of_processor

FAULT = 99
SANITIZE = ("-fsanitize=address", "-O1", "-g1", "-fno-omit-frame-pointer")
LIBRARY, BEYOND = "SLUICE_SANITIZED_LIBRARY", "SLUICE_SANITIZED_BEYOND"


def compiled(folder: Path) -> Path:
    """Compiles the C library with AddressSanitizer into a folder: what this processor can run."""
    from worker.ops import native_build

    sets = sets_of_processor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build, "COMMON", (*native_build.COMMON, *SANITIZE))
        return native_build._compile(
            os.environ.get("CC", "gcc"), folder, native_build.UNITS if sets is None else native_build.units_of(sets)
        )


def run(library: Path, *arguments: str, beyond: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs pytest with a compiled library. beyond: the name of a limit that is raised by one, in code and tests"""
    named = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {"LD_PRELOAD": named.stdout.strip(), "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FAULT}"}
    command = [sys.executable, "-m", __name__, "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, env=os.environ | environment | {LIBRARY: str(library), BEYOND: beyond}, capture_output=True, text=True
    )


def main() -> int:
    if name := os.environ[BEYOND]:  # raised before other modules copy the limit
        setattr(limits, name, getattr(limits, name) + 1)
    from worker.ops import native as library

    library.built = lambda: Path(os.environ[LIBRARY])
    return pytest.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
