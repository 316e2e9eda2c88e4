"""When an engine is loaded, some settings depend on the checkpoint."""

import pytest

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import HYBRID, Checkpoints
from worker.engine import build
from worker.engine.build import load_engine, warn_if_capped
from worker.kv_cache.sizing import GIB, PoolSize


@pytest.mark.parametrize(
    ("asked", "cached", "most"), [("auto", 64 << 20, 0), ("auto", 0, 15), ("ngram", 64 << 20, 15), ("off", 0, 0)]
)
def test_speculation_auto_is_on_for_models_larger_than_processor_caches(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, asked: str, cached: int, most: int
) -> None:
    monkeypatch.setattr(build, "PROCESSOR_CACHE_BYTES", cached)
    worker = WorkerConfig(device="cpu", speculation=asked, kv_cache_gb=0.0005)
    engine = load_engine(ModelConfig(model=str(checkpoints("llama")), max_seq_len=64), worker)
    assert engine.scheduler.config.max_draft_tokens == most


@pytest.mark.parametrize(("invariant", "kernels"), [(True, "c"), (False, "c"), (True, "torch")])
def test_drafts_and_the_promise_of_equal_bits_need_kernels_that_keep_bits(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, invariant: bool, kernels: str
) -> None:
    monkeypatch.setattr(build, "kernels_name", lambda decoder, dtype: kernels)
    worker = WorkerConfig(device="cpu", speculation="ngram", kv_cache_gb=0.0005, batch_invariant=invariant)
    engine = load_engine(ModelConfig(model=str(checkpoints("llama")), max_seq_len=64), worker)
    assert engine.scheduler.config.max_draft_tokens == (15 if invariant else 0)
    assert engine.batch_invariant is (invariant and kernels == "c")


@pytest.mark.parametrize("kind", HYBRID)
def test_recurrent_layers_have_slots_and_drafts(checkpoints: Checkpoints, kind: str) -> None:
    worker = WorkerConfig(device="cpu", speculation="ngram", kv_cache_gb=0.01)
    engine = load_engine(ModelConfig(model=str(checkpoints(kind)), max_seq_len=64), worker)
    assert engine.scheduler.config.max_draft_tokens == (15 if engine.batch_invariant else 0)
    assert engine.slots is not None and engine.slots.counts().total == engine.size.state_slots - 1 >= 3
    assert 0 < engine.size.nbytes <= 0.01 * GIB
    engine.runner.check_device()


@pytest.mark.parametrize("counted", [False, True])
def test_loads_of_experts_are_counted_if_the_flag_asks_for_them(checkpoints: Checkpoints, counted: bool) -> None:
    worker = WorkerConfig(device="cpu", expert_metrics=counted, kv_cache_gb=0.001)
    engine = load_engine(ModelConfig(model=str(checkpoints("qwen3-moe")), max_seq_len=64), worker)
    assert all(not any(loads) for loads in engine.expert_loads().values())
    engine.runner.check_device()
    experts, sparse = engine.spec.experts, [i for i, layer in enumerate(engine.spec.layers) if layer.sparse]
    assert experts is not None and sparse
    expected = {layer: experts.chosen for layer in sparse} if counted else {}
    assert {layer: sum(loads) for layer, loads in engine.expert_loads().items()} == expected
    assert all(len(loads) == experts.count for loads in engine.expert_loads().values())


def test_pool_that_is_smaller_than_its_flag_is_told(caplog: pytest.LogCaptureFixture) -> None:
    size = PoolSize((1 << 10,), 32, 2048, (), (1 << 20,))  # 1 GiB
    warn_if_capped(size, WorkerConfig(kv_cache_gb=1.0))
    warn_if_capped(size, WorkerConfig())
    assert caplog.messages == []
    warn_if_capped(size, WorkerConfig(kv_cache_gb=1000.0, max_batch_size=64))
    [message] = caplog.messages
    assert message == "--kv-cache-gb 1000 is capped to 1: 64 sequences (--max-batch-size) of 2048 tokens need no more"
