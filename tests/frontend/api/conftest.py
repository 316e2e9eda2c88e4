from pathlib import Path

import pytest

from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import LLAMA3, QWEN3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def qwen(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "qwen", QWEN3))


@pytest.fixture
def llama(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "llama", LLAMA3))
