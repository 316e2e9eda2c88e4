"""Loading an engine: settings that depend on the checkpoint."""

import pytest

from shared.config import ModelConfig, WorkerConfig
from tests.checkpoints import Checkpoints
from worker.engine import load
from worker.engine.load import load_engine


@pytest.mark.parametrize(
    ("asked", "cached", "most"), [("auto", 64 << 20, 0), ("auto", 0, 7), ("ngram", 64 << 20, 7), ("off", 0, 0)]
)
def test_speculation_auto_is_on_for_models_larger_than_processor_caches(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, asked: str, cached: int, most: int
) -> None:
    monkeypatch.setattr(load, "PROCESSOR_CACHE_BYTES", cached)
    worker = WorkerConfig(device="cpu", speculation=asked, kv_cache_gb=0.0005)
    engine = load_engine(ModelConfig(model=str(checkpoints("llama")), max_seq_len=64), worker)
    assert engine.scheduler.config.max_draft_tokens == most
