"""Default step sizes."""

import pytest

from shared.config.worker import with_default_sizes
from tests.shared.harness import parse


@pytest.mark.parametrize(
    ("argv", "on_gpu", "step", "batch", "chunk"),
    [
        ("", False, 512, 64, 512),
        ("", True, 2048, 256, 2048),
        ("--prefill-chunk-size 4096", True, 4096, 256, 4096),
        ("--max-step-tokens 32", False, 32, 32, 32),
        ("--max-batch-size 2000 --prefill-chunk-size 3000", False, 3000, 2000, 3000),
        ("--max-batch-size 8 --prefill-chunk-size 100", True, 2048, 8, 100),
        ("--no-use-chunked-prefill --prefill-chunk-size 900", False, 512, 64, 900),
    ],
)
def test_sizes_fit_the_device_and_explicit_settings(argv: str, on_gpu: bool, step: int, batch: int, chunk: int) -> None:
    worker = with_default_sizes(parse(*argv.split()).worker, on_gpu=on_gpu)
    assert (worker.max_step_tokens, worker.max_batch_size, worker.prefill_chunk_size) == (step, batch, chunk)
    assert with_default_sizes(worker, on_gpu=not on_gpu) == worker
