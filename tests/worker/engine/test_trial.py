"""The trial of a few layers, which tells the speed of a model before it is served."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.config.check import check
from shared.config.settings import Settings, with_values
from shared.config.worker import with_default_sizes
from tests.checkpoints import save
from worker.checkpoint.checkpoint import read_config
from worker.engine import trial
from worker.engine.forecast import forecast
from worker.engine.forecast import trial as tried
from worker.engine.numerics import choose_formats
from worker.models.config import spec_from_config
from worker.ops import native as c_library

pytestmark = pytest.mark.skipif(not c_library.available(torch.bfloat16), reason="needs the C library")


def measured(folder: Path) -> trial.Trial:
    settings = check(with_values(Settings(), {"model": str(folder)}), ("model",))
    settings = replace(settings, worker=replace(with_default_sizes(settings.worker, on_gpu=False), overlap=False))
    spec = spec_from_config(read_config(folder))
    return trial.measure(folder, settings, choose_formats(spec, settings.worker, torch.device("cpu")), spec)


# windows, recurrent states, compressed K/V
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "lfm2", "minicpm3"])
@pytest.mark.parametrize("layer_bytes", [1, trial.LAYER_BYTES], ids=["first", "all"])
def test_layers_of_every_kind_are_tried(
    family: str, layer_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "LAYER_BYTES", layer_bytes)
    monkeypatch.setattr(trial, "ROUNDS", 1)
    found = measured(save(family, tmp_path))
    assert 0 < found.step_s < 10 and 0 <= found.kv_byte_s < 1


def test_rest_of_the_layers_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take a second for a layer, and one for all else."""
    monkeypatch.setattr(trial, "ROUNDS", 1)
    monkeypatch.setattr(trial, "LAYER_BYTES", 1)
    monkeypatch.setattr(trial._Cut, "step_s", lambda cut, tokens: 1.0 + cut.count + (tokens == trial.LONG))
    folder = save("qwen3", tmp_path)
    layers = len(spec_from_config(read_config(folder)).layers)
    assert measured(folder).step_s == pytest.approx(1.0 + layers)
    monkeypatch.setattr(trial, "LAYER_BYTES", 1 << 40)
    assert measured(folder).step_s == pytest.approx(1.0 + layers)


def test_models_that_cannot_be_tried_are_not(tmp_path: Path) -> None:
    sparse = save("qwen3-moe", tmp_path / "sparse")
    assert tried(sparse, forecast(sparse, 8 << 30)) == {}, "the same experts would be chosen for every token"
    inputs = save("gemma4-inputs", tmp_path / "inputs")
    assert tried(inputs, forecast(inputs, 8 << 30)) == {}, "a layer's input depends on the number of layers"
    dense = save("qwen3", tmp_path / "dense")
    assert tried(dense, forecast(dense, 1 << 20)) == {}, "it does not fit"
    config = dense / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16}))
    assert tried(dense, forecast(dense, 8 << 30)) == {}, "its sequences are too short"


def test_weights_that_are_not_there_take_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the headers of the files are there, as before a download."""
    monkeypatch.setattr(trial, "ROUNDS", 1)
    folder = save("qwen3", tmp_path)
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        file.write_bytes(data[:header] + bytes(len(data) - header))
    assert measured(folder).step_s > 0
