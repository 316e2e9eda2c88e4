"""Partial sums of a split-K product are added in order and rounded once."""

import pytest
import torch

from worker.ops.norm.reference import sum_split_k
from worker.ops.triton_common import split_k_shape


def test_sum_split_k_of_a_whole_product_is_the_product() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    assert sum_split_k(x, 2, torch.bfloat16) is x


def test_sum_split_k_adds_partial_sums_in_order_and_rounds_once() -> None:
    x = torch.tensor([1.0, 2.0**-24, 2.0**-24]).reshape(3, 1, 1)
    total = sum_split_k(x, 2, torch.float32)
    assert total.shape == (1, 1) and total.item() == 1.0  # (1 + 2**-24) + 2**-24, added in float32 from left to right
    assert sum_split_k(x.flip(0), 2, torch.float32).item() > 1.0
    assert sum_split_k(torch.full((4, 2, 2), 1.001), 2, torch.bfloat16).dtype == torch.bfloat16


def test_split_k_shape_names_the_number_of_sums_and_their_distance() -> None:
    assert split_k_shape(torch.zeros(3, 4), 2, torch.float32) == (1, 0)
    assert split_k_shape(torch.zeros(5, 3, 4), 2, torch.bfloat16) == (5, 12)
    with pytest.raises(AssertionError):
        split_k_shape(torch.zeros(5, 3, 4, dtype=torch.bfloat16), 2, torch.bfloat16)
