"""Fixtures that more than one room needs."""

import pytest

from tests.checkpoints import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints("qwen3")` is the folder of a tiny checkpoint; see tests/checkpoints.py for the kinds."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
