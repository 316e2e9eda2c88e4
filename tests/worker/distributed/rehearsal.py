"""Ranks on a fake GPU: rank 0 starts and serves, and a rank of another stage is checked and measured.

`python -m tests.worker.distributed.rehearsal [MODEL ...]`. No other rank is there: the columns of a rank stand in for
those of all. In a process of its own, because the tests' process has Triton in interpreter mode.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.gpu.offline.checkpoint import checkpoint
from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.machine import Machine
from bench.gpu.offline.rehearsals import empty_attention, few_experts
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig, with_default_sizes
from tests.worker.gpu.rehearsal import Served, traffic
from worker.distributed import leader
from worker.distributed.exchange import Exchange
from worker.engine.build import load_engine
from worker.engine.load_model import find_model
from worker.engine.ranks_on_gpu import measure
from worker.kv_cache.sizing import GpuMemoryReader
from worker.models.load import load
from worker.operations import TORCH

RANKS = 2
LONGEST = 4096
MODELS: dict[str, dict[str, Any]] = {"tiny": {}, "gpt-oss-20b": {"quantization": "int4"}}


def empty_experts(h: Tensor, *rest: Any, **how: Any) -> Tensor:
    """Replaces the experts of a rank in plain PyTorch: returns uncomputed columns of this rank."""
    return h.new_empty(len(h), h.shape[1] // RANKS)


def alone(own: Tensor) -> Tensor:
    return own.repeat(1, RANKS)


def without_others(parts: Any, *rest: Any) -> Any:
    """Replaces the start of the other ranks."""
    shards: Any = SimpleNamespace(rank=0, count=RANKS, gather=alone, settle=torch.cuda.synchronize, join=lambda: None,
                                 lost=False, end=lambda: None)  # fmt: skip
    return Exchange.on_gpu(parts[0], shards, {}, torch.device("cuda")), []


def rank_0(machine: Machine, folder: Path, settings: dict[str, Any]) -> None:
    worker = WorkerConfig(
        device="cuda", tensor_parallel_size=RANKS, rank_check_weights=False, rank_check_steps=0, **settings
    )
    with patch.object(leader, "_start_all", without_others):
        engine = load_engine(ModelConfig(model=str(folder), max_seq_len=LONGEST), worker)
    engine.runner.check_device()
    assert engine.kernels == "triton" and engine.batch_invariant and not machine.recordings
    parts = [*traffic(Served(engine, folder))]
    engine.compiler.close()
    print(f"{folder.name}: rank 0 has {engine.size.pages} pages of the whole model; served {', '.join(parts)}")


def another_stage(folder: Path, settings: dict[str, Any]) -> None:
    model = ModelConfig(model=str(folder), max_seq_len=LONGEST)
    asked = WorkerConfig(device="cuda", tensor_parallel_size=RANKS, pipeline_parallel_size=2, **settings)
    worker = with_default_sizes(asked, on_gpu=True)
    device = torch.device("cuda")
    files = find_model(model, worker, device, prefer_cache=True)
    part = files.parts(worker)[-1]
    weights = load(
        files.folder, files.spec, files.formats.dtype, device, invariant=True, memory=files.formats.memory,
        share=part.share, stage=part.stage,
    )  # fmt: skip
    reader = GpuMemoryReader(device, worker.gpu_memory_utilization)
    _, free = measure(part, files, weights, model, worker, reader, lambda: None)
    assert free.kernels == "triton" and free.invariant
    print(f"{folder.name}: rank {part.rank} of stage {part.stage.index} has {free.nbytes} bytes left")


def main(words: list[str]) -> int:
    plain = patch(
        "worker.model_runner.check_kernels.TORCH",
        replace(TORCH, attention=empty_attention, experts=empty_experts),
    )
    problems: list[str] = []
    for model in words or MODELS:
        settings = MODELS[model]
        with few_experts(), tempfile.TemporaryDirectory() as root, plain:
            (Path(root) / model).mkdir()
            folder = checkpoint(Path(root) / model, model)
            with gpu() as machine, patch.multiple(torch.cuda, device_count=lambda: RANKS, set_device=lambda at: None):
                rank_0(machine, folder, settings)
                another_stage(folder, settings)
            problems += machine.findings
    print(*problems, sep="\n", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
