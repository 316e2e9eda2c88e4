"""A worker of several processes that exchange columns by gloo: it computes, and ends when one of its ranks dies."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.kernels.harness.cpu_tiers import needs_library
from tests.worker.ranks.gpu.worker import Job, Result, engine_of, generated, sequence_for

ROOT = Path(__file__).parents[4]
SOON_S = 30  # a rank that waits for a dead one would wait for STEP_S


@needs_library
@pytest.mark.parametrize(("lanes", "stages", "killed"), [(2, 2, 3)])
def test_ranks_give_the_tokens_of_one_process_and_end_together(
    checkpoints: Checkpoints, lanes: int, stages: int, killed: int
) -> None:
    folder = str(checkpoints("llama"))
    job = msgspec.json.encode(Job(folder, lanes, stages, killed)).decode()
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.ranks.gpu.worker", job], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout.splitlines()[-1], type=Result)
    alone = engine_of(Job(folder, 1, 1, 0))
    assert result.ids == generated(alone, sequence_for(alone))
    assert result.error.startswith("RankLost: a process that computes") and result.seconds < SOON_S
    deadline = time.monotonic() + SOON_S
    while any(Path(f"/proc/{pid}").exists() for pid in result.pids):
        assert time.monotonic() < deadline, "no process of a dead worker is left"
        time.sleep(0.05)
