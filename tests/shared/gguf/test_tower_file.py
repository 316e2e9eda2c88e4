"""Which tower belongs to which model, by the names that converters and the hub give to files."""

import random
from pathlib import Path

import pytest

from shared.gguf.naming import GgufError, models_among
from shared.gguf.translated import TowerFile, tower_among, tower_file

ONE = ["gemma-3-4b-it-Q4_K_M.gguf", "gemma-3-4b-it-Q8_0.gguf"]
TWO = ["SmolVLM-256M-Instruct-Q8_0.gguf", "SmolVLM-500M-Instruct-f16.gguf"]


@pytest.mark.parametrize(
    ("towers", "found"),
    [
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),  # the name that llama.cpp's converter gives
        (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["mmproj-F32.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        (["gemma-3-4b-it.mmproj-Q8_0.gguf"], "gemma-3-4b-it.mmproj-Q8_0.gguf"),
        (["other/mmproj-F16.gguf", "mmproj.txt", "ammproj-F16.gguf", "imatrix.gguf"], None),
    ],
)
def test_one_model_in_several_quantizations_has_the_only_tower(towers: list[str], found: str | None) -> None:
    names = [*ONE, *towers]
    random.shuffle(names)
    for model in ONE:
        assert tower_among(names, [model]) == found


@pytest.mark.parametrize(
    ("tower", "of"),
    [
        ("mmproj-SmolVLM-256M-Instruct-f16.gguf", TWO[0]),
        ("mmproj-smolvlm-500m-instruct-Q8_0.gguf", TWO[1]),
        ("SmolVLM-500M-Instruct-mmproj-f16.gguf", TWO[1]),
        ("SmolVLM-256M-Instruct.mmproj.gguf", TWO[0]),
        ("mmproj-model-f16.gguf", None),  # may belong to either of two models
        ("mmproj-SmolVLM-256M-f16.gguf", None),
    ],
)
def test_among_several_models_the_name_decides(tower: str, of: str | None) -> None:
    names = [*TWO, tower, "SmolVLM-2.2B-Q4_0-00001-of-00002.gguf", "SmolVLM-2.2B-Q4_0-00002-of-00002.gguf"]
    random.shuffle(names)
    for model in models_among(names):
        assert tower_among(names, model) == (tower if model == [of] else None)


def test_tower_of_a_split_model_has_its_name_without_the_number() -> None:
    files = ["big-Q4_0-00001-of-00002.gguf", "big-Q4_0-00002-of-00002.gguf"]
    assert tower_among([*files, *TWO, "mmproj-big-F16.gguf"], files) == "mmproj-big-F16.gguf"


def test_flag_is_stronger_than_names(tmp_path: Path) -> None:
    for name in (*TWO, "mmproj-SmolVLM-256M-Instruct-f16.gguf", "other.gguf"):
        (tmp_path / name).touch()
    model = [tmp_path / TWO[0]]
    assert tower_file(model, "") == TowerFile(tmp_path / "mmproj-SmolVLM-256M-Instruct-f16.gguf", given=False)
    assert tower_file(model, "off") is None and tower_file([tmp_path / TWO[1]], "") is None
    assert tower_file(model, str(tmp_path / "other.gguf")) == TowerFile(tmp_path / "other.gguf", given=True)
    with pytest.raises(GgufError, match="--mmproj /none: there is no such file"):
        tower_file(model, "/none")
