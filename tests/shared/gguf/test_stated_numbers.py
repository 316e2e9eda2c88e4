"""Tensors that the metadata states as numbers: the parameters of Apertus's activation."""

import struct
from pathlib import Path
from typing import Any

import pytest

from shared.gguf.config import write_numbers
from shared.gguf.container import Container
from shared.gguf.index import Entry
from shared.gguf.naming import NUMBERS, GgufError


def container(**metadata: Any) -> Container:
    return Container("model.gguf", {name.replace("__", "."): value for name, value in metadata.items()}, {})


def test_each_layer_has_its_number_in_the_file(tmp_path: Path) -> None:
    found = write_numbers(container(xielu__alpha_p=[0.5, -2.0], xielu__beta=0.25), 2, tmp_path, 3)
    assert found == {
        "blk.0.xielu.alpha_p": Entry(3, "F32", (1,), 0, 4), "blk.1.xielu.alpha_p": Entry(3, "F32", (1,), 4, 4),
        "blk.0.xielu.beta": Entry(3, "F32", (), 8, 4), "blk.1.xielu.beta": Entry(3, "F32", (), 12, 4),
    }  # fmt: skip
    assert struct.unpack("<4f", (tmp_path / NUMBERS).read_bytes()) == (0.5, -2.0, 0.25, 0.25)


def test_no_file_is_written_without_such_numbers(tmp_path: Path) -> None:
    assert write_numbers(container(general__name="x"), 2, tmp_path, 1) == {} and not (tmp_path / NUMBERS).exists()


@pytest.mark.parametrize(
    ("stated", "words"), [([0.5], "xielu.beta has 1 numbers for 2 layers"), (["x", 1.0], "values of a wrong type")]
)
def test_wrong_list_is_refused(stated: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=words):
        write_numbers(container(xielu__beta=stated), 2, tmp_path, 1)
