"""Fixtures of the frontend's tests."""

from pathlib import Path

import pytest

from frontend.output_parser import model_format
from frontend.text.tokenizer import Tokenizer
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.speaking import Model, tokenizer_with
from tests.templates import HARMONY, LLAMA3, QWEN3


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def qwen(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "qwen", QWEN3))


@pytest.fixture
def gpt_oss(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "gpt-oss", HARMONY, model_format.HARMONY))


@pytest.fixture
def llama(folder: Path) -> Model:
    return Model(tokenizer_with(folder / "llama", LLAMA3))
