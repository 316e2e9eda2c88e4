"""The memory check counts the drafter of --speculative-config: its weights, and its K/V with --kv-cache-gb."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.spec_decode.eagle_heads import EAGLES, WEIGHTS, Eagle
from tests.worker.spec_decode.heads import with_head
from worker.engine import load_model
from worker.engine.build import load_engine
from worker.engine.drafter import FoundDrafter, Served, find_drafter
from worker.kv_cache.sizing import PoolBudget, WeightsSize
from worker.scheduler.drafts import Proposer
from worker.spec_decode.head_drafter import HeadDrafter
from worker.spec_decode.model_drafter import ModelDrafter

METHODS = {"mtp": ("qwen3_5", "mtp."), "eagle3": ("llama", ""), "draft_model": ("llama", "")}
IDS = ("d2t", "t2d")


@pytest.mark.parametrize("kv_cache_gb", [0.01, 0.0])
@pytest.mark.parametrize("method", METHODS)
def test_memory_of_a_drafter_is_counted_before_weights_are_read(
    method: str, kv_cache_gb: float, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, prefix = METHODS[method]
    served, config = checkpoints(kind), {"method": method}
    drafting = tmp_path / "made"
    if method == "mtp":
        with_head(kind, served, drafting)
        served = drafting
    elif method == "eagle3":
        config["model"] = str(Eagle(EAGLES["flat"], served).save(drafting))
    else:
        drafting = checkpoints("qwen3-tied")
        config["model"] = str(drafting)
    sizes: list[WeightsSize] = []
    monkeypatch.setattr(load_model, "check_host_memory", lambda weights, *_: sizes.append(weights))
    worker = WorkerConfig(
        device="cpu", kv_cache_gb=kv_cache_gb, speculation="ngram", speculative_config=json.dumps(config)
    )
    engine = load_engine(ModelConfig(model=str(served), max_seq_len=64), worker)
    assert engine.scheduler.speculation is not None
    drafter = engine.scheduler.speculation.proposer
    assert isinstance(drafter, HeadDrafter | ModelDrafter)
    tensors = {name: one for name, one in load_file(drafting / WEIGHTS).items() if name.startswith(prefix)}
    weights = sum(one.numel() * 4 for name, one in tensors.items() if name not in IDS)
    if method == "draft_model":  # a tied head takes memory in addition to the embedding
        weights += tensors["model.embed_tokens.weight"].numel() * 4
    cached = sum(part.nbytes for part in (*drafter._cache.k, *drafter._cache.v))
    assert sizes[0].drafter == weights + (cached if kv_cache_gb else 0)
    assert all(one.dtype == torch.float32 for name, one in tensors.items() if name not in IDS)


def test_a_drafter_on_a_gpu_leaves_less_for_the_pool() -> None:
    """Its weights are not loaded when memory is measured. Its K/V takes a ninth of what they leave, but at least one
    sequence's."""

    def proposer(served: Served) -> Proposer:
        raise NotImplementedError

    budget = PoolBudget(1000, "end other processes")
    drafter = FoundDrafter(100, lambda room: max(50, room), proposer)
    assert drafter.leaves(budget) == PoolBudget(800, "end other processes")
    assert drafter.leaves(PoolBudget(190, "")).nbytes == 40 and drafter.leaves(PoolBudget(99, "")).nbytes == 0


@pytest.mark.parametrize("method", METHODS)
def test_drafters_on_several_gpus_are_refused_with_both_flags(method: str) -> None:
    files: Any = SimpleNamespace(device=torch.device("cuda"))
    stated = {"method": method} if method == "mtp" else {"method": method, "model": "draft"}
    worker = WorkerConfig(speculative_config=json.dumps(stated), tensor_parallel_size=2)
    words = f"--speculative-config with {method} .* --tensor-parallel-size above 1 on GPUs"
    with pytest.raises(ConfigError, match=words):
        find_drafter(files, ModelConfig(), worker)
