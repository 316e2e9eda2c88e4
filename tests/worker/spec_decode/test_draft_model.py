"""--speculative-config with a draft model: it is loaded beside the served one, or the start ends with one sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from worker.checkpoint.checkpoint import CheckpointError
from worker.engine.build import Engine, load_engine
from worker.spec_decode.model_drafter import ModelDrafter, draft_settings


def loaded(served: Path, draft: Path, **settings: bool) -> Engine:
    config = json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 5})
    worker = WorkerConfig(
        device="cpu", kv_cache_gb=0.01, speculation="ngram", speculative_config=config, max_draft_tokens=5, **settings
    )  # type: ignore[arg-type]
    return load_engine(ModelConfig(model=str(served), max_seq_len=64), worker)


@pytest.mark.parametrize(("served", "draft"), [("llama", "qwen3"), ("qwen3_5", "lfm2")])
def test_draft_model_is_loaded_beside_the_served_one(served: str, draft: str, checkpoints: Checkpoints) -> None:
    engine = loaded(checkpoints(served), checkpoints(draft))
    speculation = engine.scheduler.speculation
    assert speculation is not None and isinstance(speculation.proposer, ModelDrafter)
    assert speculation.proposer.longest == 64 and engine.scheduler.config.max_draft_tokens == 5
    alone = load_engine(ModelConfig(model=str(checkpoints(served)), max_seq_len=64), WorkerConfig(device="cpu"))
    assert engine.fingerprint == alone.fingerprint


def test_draft_model_has_no_vision_tower_of_the_served_one() -> None:
    config = json.dumps({"method": "draft_model", "model": "small.gguf"})
    own, _ = draft_settings(ModelConfig(model="m.gguf", mmproj="tower.gguf"), WorkerConfig(speculative_config=config))
    assert (own.model, own.mmproj) == ("small.gguf", "off")


def test_draft_model_is_left_out_where_drafts_are_off(checkpoints: Checkpoints) -> None:
    engine = loaded(checkpoints("llama"), checkpoints("llama"), batch_invariant=False)
    assert engine.scheduler.speculation is None


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_two_tokens_exchanged(folder: Path) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = told["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(told))


def with_a_larger_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
        (with_two_tokens_exchanged, "has other tokens than the served model under some ids"),
        (with_a_larger_vocabulary, "has a vocabulary of 576 tokens, and the served model one of 512"),
        (shutil.rmtree, "draft"),
    ],
)
def test_draft_model_that_does_not_fit_is_refused_in_a_sentence(
    spoil: Callable[[Path], None], words: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    draft = Path(shutil.copytree(checkpoints("llama"), tmp_path / "draft"))
    spoil(draft)
    with pytest.raises(CheckpointError) as refused:
        loaded(checkpoints("llama"), draft)
    sentence = str(refused.value)
    assert sentence.startswith("the draft model (--speculative-config) cannot be used: ") and words in sentence
    assert "\n" not in sentence
