"""The worker reads the numbers that bench/ writes in the AWQ layout."""

import torch

from bench.awq_checkpoint import awq, unpacked


def test_awq_tensors_mean_numbers_close_to_the_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 64)
    tensors = awq(weight, 32)
    codes, zeros = unpacked(tensors["qweight"]), unpacked(tensors["qzeros"]).repeat_interleave(32, 0)
    scales = tensors["scales"].float().repeat_interleave(32, 0)
    found = ((codes - zeros) * scales).T
    assert float(((found - weight).abs() / scales.T).max()) < 1.01
