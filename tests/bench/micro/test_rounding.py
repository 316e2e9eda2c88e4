import pytest
import torch

from bench.micro.rounding import ROUNDINGS, mxfp4, q4_k


@pytest.mark.parametrize(("name", "limit"), [("MXFP4", 0.15), ("NF4", 0.12), ("Q4_K", 0.09)])
def test_rounding_error_is_that_of_four_bits(name: str, limit: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 640)
    error = (ROUNDINGS[name](weight).dequantize(torch.float32) - weight).norm() / weight.norm()
    assert limit / 2 < error < limit


def test_mxfp4_keeps_numbers_of_the_format() -> None:
    weight = torch.tensor([[6.0, -4.0, 0.5, 1.5] * 8 + [0.75, -0.0625, 0.5, 0.125] * 8])
    assert torch.equal(mxfp4(weight).dequantize(torch.float32), weight)


def test_q4_k_keeps_numbers_of_the_format() -> None:
    weight = torch.tensor([list(range(-5, 11)) * 2], dtype=torch.float32) * 63 / 64
    assert torch.allclose(q4_k(weight).dequantize(torch.float32), weight, atol=2e-3)
