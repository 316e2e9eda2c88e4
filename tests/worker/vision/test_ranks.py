"""Ranks that compute a model with a vision tower together give the answers of one process."""

from pathlib import Path
from typing import Any

import pytest

from shared import messages as m
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.wire import pack_u32
from tests.worker.engine.harness import Bench
from tests.worker.ops.harness.cpu_tiers import needs_library
from tests.worker.vision.harness import PLACEHOLDER, prompt_with
from worker.engine.build import load_engine
from worker.vision.vision import ImageAdmission

pytestmark = needs_library


@pytest.mark.parametrize(
    ("kind", "several"),
    [
        ("qwen3_5", {"tensor_parallel_size": 2}),
        ("qwen3_5", {"pipeline_parallel_size": 2}),
        ("qwen3_vl", {"pipeline_parallel_size": 2}),
    ],
)
def test_answers_of_two_ranks_are_those_of_one(towers: dict[str, Path], kind: str, several: dict[str, Any]) -> None:
    """Images of Qwen3-VL add vectors after the first layers, and these layers are on the first stage."""
    answers = []
    for more in ({}, several):
        worker = WorkerConfig(
            device="cpu", dtype="float32", kv_cache_gb=0.02, page_size=16, prefill_chunk_size=16, threads=2, **more
        )
        engine = load_engine(ModelConfig(model=str(towers[kind]), max_seq_len=256), worker)
        assert engine.tower is not None and engine.tower.spec is not None
        bench = Bench(
            runner=engine.runner, config=engine.scheduler.config, pools=engine.pools, slots=engine.slots,
            vocab_size=engine.spec.vocab_size,
        )  # fmt: skip
        bench.request_table._give_images = ImageAdmission(engine.tower, bench.scheduler.sequences)
        prompt, images = prompt_with(2, engine.tower.spec)
        sampling = m.Sampling(12, temperature=0.0, ignore_eos=True, logit_bias=((PLACEHOLDER, -100.0),))
        bench.send(m.Submit(1, pack_u32(prompt), sampling, images=images), m.Submit(2, pack_u32([20, 30]), sampling))
        bench.iterate(30)
        answers.append(bench.received()[0])
    # The other rank ends with this process.
    assert answers[0] == answers[1] and len(answers[0][1]) == 12
