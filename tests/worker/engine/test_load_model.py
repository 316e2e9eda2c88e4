"""A model can be loaded without an engine around it, and an engine is built around a loaded model."""

from collections.abc import Callable

import pytest
import torch

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig, with_default_sizes
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from worker.engine import load_model as load_models
from worker.engine.build import build_engine, load_engine
from worker.engine.load_model import LoadedModel, find_model, load_model
from worker.structured_output.compiler import GrammarCompiler

CPU = torch.device("cpu")
WORKER = with_default_sizes(WorkerConfig(device="cpu", kv_cache_gb=0.01, overlap=False), on_gpu=False)
Load = Callable[[str], tuple[ModelConfig, LoadedModel]]


@pytest.fixture
def load(checkpoints: Checkpoints) -> Load:
    def loaded(kind: str) -> tuple[ModelConfig, LoadedModel]:
        model = ModelConfig(model=str(checkpoints(kind)), max_seq_len=64)
        return model, load_model(find_model(model, WORKER, CPU), model, WORKER, lambda done, total: None)

    return loaded


def test_loaded_model_computes_without_an_engine(load: Load, checkpoints: Checkpoints) -> None:
    _, loaded = load("qwen3")
    assert loaded.files.spec.model_type == "qwen3" and loaded.gpu is None
    told = []
    for decoder in (loaded.decoder(64), decoder_of(checkpoints("qwen3"), positions=64)):
        told.append(all_logits(decoder, cache_for(decoder, tokens=64), prompts_of([20]), chunk=7)[0])
    torch.testing.assert_close(*told)


def test_engine_around_a_loaded_model_is_that_of_its_name(load: Load) -> None:
    model, loaded = load("llama")
    files = loaded.files
    compiler = GrammarCompiler(files.folder, files.spec.vocab_size, files.spec.eos_ids)
    engine, whole = build_engine(loaded, compiler, model, WORKER, lambda: None), load_engine(model, WORKER)
    engine.runner.check_device()
    assert (engine.fingerprint, engine.size, engine.limits) == (whole.fingerprint, whole.size, whole.limits)


def test_lengths_that_the_model_does_not_have_are_refused_before_its_weights_are_read(checkpoints: Checkpoints) -> None:
    model = ModelConfig(model=str(checkpoints("llama")), max_seq_len=1 << 30)
    with pytest.raises(ConfigError, match="--max-seq-len"):
        find_model(model, WORKER, CPU)


def test_weights_are_hashed_while_the_kernels_are_compiled(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Hashes(load_models.ContentHashes):
        def __init__(self, *arguments: object) -> None:
            steps.append("hash")
            super().__init__(*arguments)  # type: ignore[arg-type]

    def wait(on_progress: Callable[[], None]) -> None:
        steps.append("wait")
        on_progress()

    monkeypatch.setattr(load_models, "ContentHashes", Hashes)
    monkeypatch.setattr(load_models, "wait_for_library", wait)
    monkeypatch.setattr(
        load_models, "load_weights", lambda *_, read=load_models.load_weights: steps.append("read") or read(*_)
    )
    load("llama")
    assert steps == ["hash", "wait", "read"]
