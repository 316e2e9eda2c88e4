"""--speculative-config with mtp: the head is loaded from the checkpoint, or the start ends with one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.spec_decode.heads import GLM, HEADS, QWEN, WEIGHTS, with_head
from worker.checkpoint.checkpoint import CheckpointError
from worker.engine import build
from worker.engine import drafter as drafters
from worker.engine.build import Engine, load_engine
from worker.engine.load_model import ModelFiles, load_model
from worker.spec_decode.head_drafter import HeadDrafter


def loaded(folder: Path, **settings: bool | str) -> Engine:
    worker = WorkerConfig(device="cpu", kv_cache_gb=0.01, speculation="ngram", max_draft_tokens=3, **settings)  # type: ignore[arg-type]
    return load_engine(ModelConfig(model=str(folder), max_seq_len=64), worker)


def with_mtp(folder: Path, **settings: bool | str) -> Engine:
    return loaded(folder, speculative_config=json.dumps({"method": "mtp", "num_speculative_tokens": 3}), **settings)


def test_head_of_the_checkpoint_drafts_and_is_no_part_of_the_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with_head("qwen3_5", checkpoints("qwen3_5"), folder)
    engine = with_mtp(folder)
    speculation = engine.scheduler.speculation
    assert speculation is not None and isinstance(speculation.proposer, HeadDrafter)
    assert engine.runner.hidden_reader is speculation.proposer
    plain = loaded(folder)
    assert plain.fingerprint == engine.fingerprint and plain.runner.hidden_reader is None
    assert with_mtp(folder, batch_invariant=False).runner.hidden_reader is None, "drafts are off"


def drafts_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(build, "PROCESSOR_CACHE_BYTES", 0)
    return load_engine(ModelConfig(model=str(folder), max_seq_len=64), WorkerConfig(device="cpu", kv_cache_gb=0.01))


def test_head_drafts_by_default_unless_it_cannot_be_used(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "made"
    with_head("qwen3_5", checkpoints("qwen3_5"), folder)
    engine = drafts_by_default(folder, monkeypatch)
    assert engine.scheduler.speculation is not None and engine.runner.hidden_reader is not None
    assert engine.scheduler.speculation.proposer is engine.runner.hidden_reader

    def too_much(
        files: ModelFiles, model: ModelConfig, worker: WorkerConfig, on_progress: Any, drafter: int = 0, *others: Any
    ) -> Any:
        if drafter:
            raise ConfigError("the model needs more memory than there is")
        return load_model(files, model, worker, on_progress, drafter, *others)

    with monkeypatch.context() as patch:
        patch.setattr(drafters, "load_model", too_much)
        assert drafts_by_default(folder, monkeypatch).runner.hidden_reader is None
    assert "proposes no drafts: the model needs more memory" in caplog.text
    tensors = load_file(folder / WEIGHTS)
    del tensors["mtp.fc.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    engine = drafts_by_default(folder, monkeypatch)
    assert engine.runner.hidden_reader is None and engine.scheduler.speculation is not None
    assert "mtp.fc.weight is missing" in caplog.text


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: [tensors.pop(one) for one in list(tensors) if one.startswith(name)].clear()


def narrowed(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


LAYER = "model.layers.3."
SPOILED = [
    ("qwen3_5", without("mtp."), "has no MTP head: no tensor's name begins with mtp.layers.0. or model.layers.3."),
    ("glm4-moe", without(LAYER), "has no MTP head: no tensor's name begins with mtp.layers.0. or model.layers.3."),
    *(("qwen3_5", without(f"{name}.weight"), f"tensor {name}.weight is missing") for name in QWEN.values()),
    *(("glm4-moe", without(f"{name}.weight"), f"tensor {name}.weight is missing") for name in GLM.values()),
    ("qwen3_5", without("mtp.layers.0.mlp.up_proj"), "tensor mtp.layers.0.mlp.up_proj.weight is missing"),
    ("qwen3_5", narrowed("mtp.fc.weight"), "tensor mtp.fc.weight has shape"),
    ("qwen3_5", lambda all: all.update({"mtp.layers.0.x": torch.ones(3)}), "mtp.layers.0.x does not belong"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen3_5", "glm4-moe"])
def test_head_that_cannot_be_used_is_refused_in_a_sentence(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert kind in HEADS
    whole = tmp_path / "whole"
    with_head(kind, checkpoints(kind), whole)
    tensors = load_file(whole / WEIGHTS)
    for at, (_, spoil, words) in enumerate(one for one in SPOILED if one[0] == kind):
        folder = Path(shutil.copytree(whole, tmp_path / str(at)))
        spoiled = dict(tensors)
        spoil(spoiled)
        save_file(spoiled, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as refused:
            with_mtp(folder)
        assert words in str(refused.value) and "\n" not in str(refused.value)


def test_family_without_heads_is_refused_in_a_sentence(checkpoints: Checkpoints) -> None:
    with pytest.raises(CheckpointError, match="has no MTP head"):
        with_mtp(checkpoints("llama"))
