"""A tensor that is read twice counts twice, so that progress ends at 100 %. Refusals are in test_weights.py."""

import torch

from tests.checkpoints import Checkpoints
from worker.checkpoint.checkpoint import read_config
from worker.models.config import spec_from_config
from worker.models.load import load


def test_progress_ends_at_its_total_where_values_are_keys(checkpoints: Checkpoints) -> None:
    folder, told = checkpoints("gemma4-dense"), []
    load(
        folder, spec_from_config(read_config(folder)), torch.float32, torch.device("cpu"), invariant=False,
        on_progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] == told[0][1] > 0
