"""A worker of several processes that exchange columns by gloo: it computes, and ends when one of its ranks dies."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from tests.worker.distributed.test_rendezvous import free_ports
from tests.worker.distributed.worker import Job, Result, engine_of, generated, sequence_for
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.distributed.nccl import STEP_S

ROOT = Path(__file__).parents[3]
SOON_S = STEP_S / 2  # a rank that waits for a dead one would wait for STEP_S


def started(job: Job) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "tests.worker.distributed.worker", msgspec.json.encode(job).decode()]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check(job: Job, rank_0: "subprocess.Popen[str]") -> None:
    """Checks what rank 0 says: it has the tokens of one process, and sees soon that another rank has died."""
    said, errors = rank_0.communicate(timeout=PATIENCE_S)
    assert rank_0.returncode == 0, errors
    result = msgspec.json.decode(said.splitlines()[-1], type=Result)
    alone = engine_of(Job(job.folder, device=job.device))
    assert result.ids == generated(alone, sequence_for(alone))
    assert result.error.startswith("RankLost: a process that computes") and result.seconds < SOON_S
    deadline = time.monotonic() + SOON_S
    while any(Path(f"/proc/{pid}").exists() for pid in result.pids if pid != result.pids[job.killed]):
        assert time.monotonic() < deadline, "no process of a dead worker is left"
        time.sleep(0.05)


@needs_library
def test_ranks_give_the_tokens_of_one_process_and_end_together(checkpoints: Checkpoints) -> None:
    job = Job(str(checkpoints("llama")), tp_size=2, stages=2, killed=3)
    check(job, started(job))


@needs_library
def test_ranks_of_several_hosts_find_each_other_and_end_together(checkpoints: Checkpoints) -> None:
    job = Job(str(checkpoints("llama")), tp_size=2, killed=1, port=free_ports(2))
    other, rank_0 = started(msgspec.structs.replace(job, rank=1)), started(job)
    try:
        check(job, rank_0)
    finally:
        other.communicate(timeout=PATIENCE_S)
    assert other.returncode == -signal.SIGKILL
