"""Fixtures of the frontend's tests."""

import pytest

from frontend.text.tokenizer import Tokenizer
from tests.fakes import tokenizer as small_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
