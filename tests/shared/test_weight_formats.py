"""Tests of shared/checkpoint.py."""

from pathlib import Path

import pytest

from shared.weight_formats import folder_problem


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "is empty: a folder with config.json"),
        (["config.json"], "holds no weights"),
        (["config.json", "training_args.bin", "optimizer.pt"], "holds no weights"),
        (["config.json", "pytorch_model.bin"], "only in Python's pickle format (pytorch_model.bin), whose files"),
        (["consolidated.00.pth", "params.json"], "Python's pickle format (consolidated.00.pth)"),
        (["config.json", *(f"pytorch_model-{i}.bin" for i in range(4))], "pytorch_model-2.bin, …)"),
        (["config.json", "tf_model.h5", "flax_model.msgpack"], "Flax's msgpack and Keras's HDF5"),
        (["model.onnx"], "only in ONNX (model.onnx): a folder with"),
        (["consolidated.safetensors", "params.json"], "has safetensors, but no config.json"),
    ],
)  # fmt: skip
def test_folder_of_another_format_is_named(tmp_path: Path, names: list[str], words: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    problem = folder_problem(tmp_path)
    assert words in problem and str(tmp_path) in problem and "\n" not in problem


@pytest.mark.parametrize(
    "names",
    [
        ["config.json", "model.safetensors", "pytorch_model.bin"],
        ["config.json", "model.safetensors.index.json"],
        ["adapter_config.json", "adapter_model.safetensors"],
        ["model.gguf"],
        ["gguf.json", "config.json"],
    ],
)
def test_folder_that_may_be_served_has_no_problem(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert folder_problem(tmp_path) == ""
