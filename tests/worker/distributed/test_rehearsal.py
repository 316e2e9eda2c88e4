"""Ranks on a fake GPU start, check their kernels, measure their memory and serve."""

import pytest
import torch

from tests.worker.gpu.test_rehearsal import rehearsed


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the fake GPU runs only where there is none")
def test_ranks_are_checked_and_measured_and_serve() -> None:
    """To rehearse a mixture of experts, too: `python -m tests.worker.distributed.rehearsal`."""
    said = rehearsed("tests.worker.distributed.rehearsal", "tiny")
    assert "rank 0 has" in said and "served one by one, crowds, long ones" in said
    assert "rank 3 of stage 1 has" in said
