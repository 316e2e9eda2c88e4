"""Loading weights: a model that does not fit into memory is refused before its weights are read."""

import re
from pathlib import Path
from typing import Any

import pytest

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.machine import Memory
from tests.checkpoints import Checkpoints
from worker.engine import load_model
from worker.engine.build import load_engine
from worker.models.load import Loader

GIB = 1 << 30


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "_tensor", lambda *args: pytest.fail("a weight was read"))


def load(folder: Path, **worker: Any) -> None:
    load_engine(ModelConfig(model=str(folder), max_seq_len=64), WorkerConfig(device="cpu", dtype="bfloat16", **worker))


@pytest.mark.usefixtures("unread")
def test_weights_larger_than_the_machine_are_refused(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_model, "memory", lambda: Memory(1 << 16, 1 << 16, 0))
    with pytest.raises(ConfigError, match=r"^the model needs 0\.0 GiB for its weights, but 0\.0 GiB of 0\.0 GiB are "):
        load(checkpoints("llama"))


@pytest.mark.usefixtures("unread")
def test_pool_larger_than_what_is_available_is_refused(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max_batch_size` is large here, because the pool is never larger than so many sequences need."""
    monkeypatch.setattr(load_model, "memory", lambda: Memory(GIB, GIB // 2, 0))
    with pytest.raises(ConfigError) as caught:
        load(checkpoints("llama"), kv_cache_gb=9.0, max_batch_size=20_000, max_step_tokens=20_000)
    words = r"and (\d\.\d) GiB for the K/V pool, but 0\.5 GiB of 1\.0 GiB are available: lower --kv-cache-gb to 0\.4"
    found = re.search(words, str(caught.value))
    assert found is not None and 0.6 < float(found[1]) < 9


def test_what_fits_is_loaded(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_model, "memory", lambda: Memory(GIB, GIB // 2, 0))
    load(checkpoints("llama"), kv_cache_gb=0.01)
