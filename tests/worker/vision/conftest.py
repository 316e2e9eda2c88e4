"""Fixtures that make each kind of checkpoint with a vision tower once."""

from pathlib import Path

import pytest

from tests.worker.vision.harness import MODELS, save


@pytest.fixture(scope="session")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    return {kind: save(kind, root / kind) for kind in MODELS}
