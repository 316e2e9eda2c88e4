"""On a machine with several GPUs: ranks exchange columns by NCCL, give the tokens of one GPU, and end together."""

import pytest
import torch

from tests.checkpoints import Checkpoints
from tests.worker.distributed.test_worker import check, started
from tests.worker.distributed.worker import Job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize(("tp_size", "stages", "killed"), [(2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_ranks_give_the_tokens_of_one_gpu_and_end_together(
    checkpoints: Checkpoints, tp_size: int, stages: int, killed: int
) -> None:
    if torch.cuda.device_count() < tp_size * stages:
        pytest.skip(f"needs {tp_size * stages} CUDA devices")
    job = Job(str(checkpoints("llama")), tp_size, stages, killed, device="cuda")
    check(job, started(job))
