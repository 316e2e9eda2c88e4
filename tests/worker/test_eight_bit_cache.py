"""--kv-cache-dtype fp8 on the CPU, where plain PyTorch serves it: accuracy against the model's own format; a worker."""

import logging

import pytest
import torch

from shared.config import ModelConfig, WorkerConfig
from shared.messages import Sampling
from tests.checkpoints import Checkpoints
from tests.worker.model.harness import all_logits, cache_for, decoder_of, prompts_of
from tests.worker.schedule.harness import commit
from worker.engine.load import Engine, load_engine
from worker.schedule.sequence import Sequence

LENGTHS = [1, 33, 70, 100]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_fp8_cache_keeps_logits_close(checkpoints: Checkpoints, kind: str, dtype: torch.dtype) -> None:
    """As far as eight bits go: three of them are of the mantissa, and these models' weights are drawn wide."""
    decoder, prompts = decoder_of(checkpoints(kind), dtype=dtype), prompts_of(LENGTHS)
    whole, short = (
        all_logits(decoder, cache_for(decoder, tokens=512, kept=kept), prompts, 24) for kept in ("auto", "fp8")
    )
    alone = all_logits(decoder, cache_for(decoder, tokens=512, kept="fp8"), prompts[-1:], 512)[0]
    for expected, got in zip(whole, short, strict=True):
        assert 1e-3 < away(got, expected) < 0.2
    assert away(alone, short[-1]) < 0.02, "chunks and company change the rounding of sums, not the format"


def away(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def engine(checkpoints: Checkpoints, kept: str) -> Engine:
    worker = WorkerConfig(device="cpu", dtype="bfloat16", kv_cache_dtype=kept, kv_cache_gb=0.0005, page_size=16)
    return load_engine(ModelConfig(model=str(checkpoints("qwen3")), max_seq_len=256), worker)


def test_fp8_cache_has_twice_as_many_pages(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    plain = engine(checkpoints, "auto").pool
    assert "--kv-cache-dtype" not in caplog.text
    with caplog.at_level(logging.INFO):
        small = engine(checkpoints, "fp8")
    assert small.pool.available >= 2 * plain.available > 0
    assert "K/V in torch.float8_e4m3fn" in caplog.text and caplog.text.count("--kv-cache-dtype saves memory") == 1
    sampling = Sampling(12, temperature=0.0, ignore_eos=True)
    both = [Sequence((b"", i), prompts_of([70 + i], seed=i)[0], 70 + i, sampling, 0, 0.0) for i in range(2)]
    for sequence in both:
        small.scheduler.submit(sequence, 0.0)
    while small.scheduler.has_work:
        plan = small.scheduler.plan(0.0)
        commit(small.scheduler, plan, small.runner.step(plan).ids, 0.0)
    for sequence in both:
        assert sequence.output_len == 12 and len(set(sequence.tokens[-12:])) > 3
