"""Fixtures for all tests of the folder: the real model's file, its server and its reference."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving
from tests.real.model import real_model
from tests.real.reference import Reference


@pytest.fixture(scope="session")
def model_file() -> Path:
    if not (file := real_model()):
        pytest.skip("the real model is not on this machine: SLUICE_TEST_REAL_MODEL names its file")
    return file


@pytest.fixture(scope="session")
def server(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model_file, tmp_path_factory.mktemp("real") / "log", held=True) as server:
        yield server


@pytest.fixture(scope="session")
def reference(model_file: Path) -> Reference:
    return Reference(model_file)
