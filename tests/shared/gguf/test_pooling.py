"""GGUF files with a pooling type are embedding models."""

from pathlib import Path

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.checkpoint import GENERATE, Task, read_task
from shared.gguf.naming import GgufError
from shared.gguf.translated import translated
from shared.messages import PoolingKind
from tests.gguf_files import write

ENDS = {"tokenizer.ggml.add_eos_token": True}


@pytest.mark.parametrize(
    ("pooling", "task"),
    [
        (0, GENERATE),
        (1, Task("embed", PoolingKind.MEAN)),
        (2, Task("embed", PoolingKind.FIRST)),
        (3, Task("embed", PoolingKind.LAST)),
    ],
)
def test_pooling_type_makes_a_file_an_embedding_model(tmp_path: Path, pooling: int, task: Task) -> None:
    file = write("qwen3", tmp_path, more={"qwen3.pooling_type": pooling, **ENDS}).file
    for only_text in (False, True):
        folder = translated([file], tmp_path / "cache", only_text=only_text)
        assert read_task(folder) == task
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode_now(["The river"])[0][-1] in tokenizer.eos_ids


def test_pooling_of_a_ranking_model_is_refused(tmp_path: Path) -> None:
    file = write("qwen3", tmp_path, more={"qwen3.pooling_type": 4}).file
    with pytest.raises(
        GgufError, match=r"qwen3\.pooling_type is 4; supported are 1 \(mean\), 2 \(cls\), 3 \(lasttoken\)"
    ):
        translated([file], tmp_path / "cache")
