"""Finds the file of the real model, if this machine has it."""

import os
from pathlib import Path

from deploy.launcher.packaged_model import SMOLLM2, cached


def real_model() -> Path | None:
    """Returns the file that SLUICE_TEST_REAL_MODEL names, else the one that `sluice` has fetched, else None."""
    named = os.environ.get("SLUICE_TEST_REAL_MODEL")
    return Path(named) if named else cached(SMOLLM2)
