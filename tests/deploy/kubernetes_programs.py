"""Helm and kubectl, which `make helm` installs on x86-64, and so does `make test FULL=1`.

Without them their tests are skipped, and fail where the variable REQUIRED is set: `make test FULL=1` sets it.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

REQUIRED = "SLUICE_TESTS_NEED_HELM"
ADVICE = "is not installed: `make helm` puts it into .venv/bin"


def program(name: str) -> str:
    """Returns the path of a program, from this Python environment or the PATH; skips or fails the test without it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        end = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
        end(f"{name} {ADVICE}")
    return found
