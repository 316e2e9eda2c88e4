"""Makes files that belong to another user."""

import os
from pathlib import Path

import pytest

STRANGER = 54321


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file another user's: root changes the owner; without root, the test pretends to be another user."""
    if os.geteuid() == 0:
        os.lchown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
