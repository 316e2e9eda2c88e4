"""The short convolution agrees with PyTorch's, and has the same bits however a prompt is cut, in any company."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness import recurrent
from tests.worker.ops.harness.cases import TRITON_DTYPES
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library, tier
from worker.ops.recurrent import short_conv
from worker.ops.recurrent.reference import short_conv_torch
from worker.ops.recurrent_state import ShortConvShape, StateSlots

__all__ = ["tier"]

SHAPES = [ShortConvShape(64, 3), ShortConvShape(101, 4), ShortConvShape(2048, 3), ShortConvShape(40, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def on_triton(*args: Tensor) -> Tensor:
    from worker.ops.recurrent.triton import short_conv_triton

    return short_conv_triton(*args)  # type: ignore[arg-type]


class Layer(recurrent.RecurrentLayer):
    def __init__(self, shape: ShortConvShape, dtype: torch.dtype, how: Callable[..., Tensor] = short_conv) -> None:
        torch.manual_seed(0)
        self.shape, self.how, self.weight = shape, how, torch.randn(shape.taps, shape.channels)
        super().__init__(shape, torch.randn(37, 3 * shape.channels).to(dtype))

    def run(self, x: Tensor, slots: StateSlots) -> Tensor:
        return self.how(x, self.weight, self.state, slots)

    def expected(self) -> Tensor:
        """Computes the whole sequence with PyTorch's convolution."""
        b, c, x = self.x.chunk(3, dim=1)
        padded = torch.nn.functional.pad((b * x).float().T, (self.shape.taps - 1, 0))
        conv = torch.nn.functional.conv1d(padded[None], self.weight.T[:, None], groups=self.shape.channels)[0].T
        return c * conv.to(c.dtype)


@shapes
@pytest.mark.parametrize("how", [short_conv_torch, on_triton])
def test_torch_and_triton_convolve(shape: ShortConvShape, how: Callable[..., Tensor]) -> None:
    layer = Layer(shape, torch.float32, how)
    torch.testing.assert_close(layer.in_chunks([37]), layer.expected(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.in_chunks([1, 2, 20, 37]), layer.expected(), atol=1e-5, rtol=1e-5)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier")
def test_library_agrees_with_torch(shape: ShortConvShape, dtype: torch.dtype) -> None:
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 2e-2}
    ours, plain = Layer(shape, dtype), Layer(shape, dtype, short_conv_torch)
    torch.testing.assert_close(ours.in_chunks([37]), plain.in_chunks([37]), **tolerance)
    assert torch.equal(ours.state.tail[1], plain.state.tail[1])


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier", "threads")
def test_any_cut_and_any_threads_give_the_same_bits(shape: ShortConvShape, dtype: torch.dtype) -> None:
    recurrent.assert_any_cut_and_any_threads_give_the_same_bits(Layer(shape, dtype))


@needs_library
@dtypes
@pytest.mark.usefixtures("tier")
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    recurrent.assert_company_changes_no_bit(Layer(SHAPES[1], dtype))


@pytest.mark.parametrize("dtype", TRITON_DTYPES[:2])
def test_triton_gives_the_same_bits_in_any_cut_and_company(dtype: torch.dtype) -> None:
    layer = Layer(SHAPES[1], dtype, on_triton)
    whole = layer.in_chunks([37])
    for cuts in ([1, 2, 3, 4, 37], [2, 18, 19, 37]):
        assert torch.equal(layer.in_chunks(cuts), whole)
    recurrent.assert_company_changes_no_bit(layer)
