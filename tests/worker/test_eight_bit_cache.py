"""--kv-cache-dtype fp8, int8 and int4 on the CPU: accuracy compared with the model's own format, and a whole worker."""

import logging

import pytest
import torch

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from tests.worker.scheduler.harness import commit
from worker.engine.build import Engine, load_engine
from worker.scheduler.sequence import Sequence

LENGTHS = [1, 33, 70, 100]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "kept", "most"),
    [
        *(
            (kind, *kept)
            for kind in ("llama", "qwen3", "gemma3", "minicpm3")
            for kept in (("fp8", 0.2), ("int8", 0.05))
        ),
        *((kind, "int4", 0.3) for kind in ("llama", "gemma3")),
    ],
)
@torch.inference_mode()
def test_eight_bit_cache_keeps_logits_close(
    checkpoints: Checkpoints, kind: str, dtype: torch.dtype, kept: str, most: float
) -> None:
    """The limits are wide, because fp8 has only three mantissa bits, and the models' large weights amplify errors."""
    decoder, prompts = decoder_of(checkpoints(kind), dtype=dtype), prompts_of(LENGTHS)
    whole, short = (
        all_logits(decoder, cache_for(decoder, tokens=512, kept=kept), prompts, 24) for kept in ("auto", kept)
    )
    alone = all_logits(decoder, cache_for(decoder, tokens=512, kept=kept), prompts[-1:], 512)[0]
    for expected, got in zip(whole, short, strict=True):
        assert 1e-4 < away(got, expected) < most
    assert torch.equal(alone, short[-1]), "neither chunks nor company change a bit"


def away(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def engine(checkpoints: Checkpoints, kept: str, dtype: str = "bfloat16") -> Engine:
    worker = WorkerConfig(device="cpu", dtype=dtype, kv_cache_dtype=kept, kv_cache_gb=0.0005, page_size=16)
    return load_engine(ModelConfig(model=str(checkpoints("qwen3")), max_seq_len=256), worker)


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        ("fp8", "torch.float8_e4m3fn"),
        ("int8", "rotated int8"),
        ("int4", "rotated int8 keys, rotated int4 values in groups of 32"),
    ],
)
def test_eight_bit_cache_has_almost_twice_as_many_pages(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, kept: str, named: str
) -> None:
    plain = engine(checkpoints, "auto").pools[0]
    with caplog.at_level(logging.INFO):
        small = engine(checkpoints, kept)
    assert small.pools[0].available >= 1.5 * plain.available > 0, (
        "a head of 16 elements takes at most 20 bytes and not 32"
    )
    assert f"K/V in {named}" in caplog.text and "--kv-cache-dtype" not in caplog.text
    serve(small)


def test_eight_bit_cache_without_c_kernels_is_served_by_torch(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    slow = engine(checkpoints, "int8", "float16")
    assert caplog.text.count("--kv-cache-dtype saves memory here, not time") == 1
    serve(slow)


def serve(small: Engine) -> None:
    sampling = Sampling(12, temperature=0.0, ignore_eos=True)
    both = [Sequence((b"", i), prompts_of([70 + i], seed=i)[0], 70 + i, sampling, 0) for i in range(2)]
    for sequence in both:
        small.scheduler.submit(sequence, 0.0)
    while small.scheduler.has_work:
        plan = small.scheduler.plan(0.0)
        commit(small.scheduler, plan, small.runner.step(plan).ids, 0.0)
    for sequence in both:
        assert sequence.output_len == 12 and len(set(sequence.tokens[-12:])) > 3
