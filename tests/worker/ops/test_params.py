"""Skipping a stage of sampling that no row needs changes no result."""

import torch

from worker.ops.sampling.reference import EVERY, PlainParams, Stages, sample_torch


def params(temperature: float) -> PlainParams:
    rows = 6
    return PlainParams(
        torch.full((rows,), temperature), torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows),
        torch.arange(rows), torch.arange(rows),
    )  # fmt: skip


def test_stages_that_no_row_needs_change_no_result() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    off = Stages(any_greedy=False, any_top_k=False, any_top_p=False, any_min_p=False)
    assert sample_torch(logits, params(1.0), off).equal(sample_torch(logits, params(1.0), EVERY))
    greedy = Stages(all_greedy=True, any_top_k=False, any_top_p=False, any_min_p=False)
    assert sample_torch(logits, params(0.0), greedy).equal(logits.argmax(-1))
    assert sample_torch(logits, params(0.0), EVERY).equal(logits.argmax(-1))
