"""The short convolution: as PyTorch computes it, and the same bits in any cut of a prompt and any company."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.worker.kernels.harness.cases import TRITON_DTYPES
from tests.worker.kernels.harness.cpu_tiers import dtypes, needs_library, tier  # noqa: F401
from worker.kernels.recurrent_state import NO_STATE, RecurrentState
from worker.kernels.short_conv import ShortConvShape, short_conv, short_conv_torch

SHAPES = [ShortConvShape(64, 3), ShortConvShape(101, 4), ShortConvShape(2048, 3), ShortConvShape(40, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def on_triton(*args: Tensor) -> Tensor:
    from worker.kernels.gpu.short_conv import short_conv_triton

    return short_conv_triton(*args)  # type: ignore[arg-type]


@dataclass
class Layer:
    """A layer with its states, and inputs of one sequence."""

    shape: ShortConvShape
    dtype: torch.dtype
    how: Callable[..., Tensor] = short_conv
    rows: int = 37
    x: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.randn(self.shape.taps, self.shape.channels)
        self.state = RecurrentState.zeros(self.shape, 16, self.dtype, torch.device("cpu"))
        self.state.tail.fill_(torch.nan)  # what no one wrote must not be read
        self.x = torch.randn(self.rows, 3 * self.shape.channels).to(self.dtype)

    def run(self, x: Tensor, read: Tensor, write: Tensor, starts: Tensor) -> Tensor:
        return self.how(x, self.weight, self.state, read, write, starts)

    def in_chunks(self, *cuts: int) -> Tensor:
        """The sequence, computed in chunks that end at `cuts`. Two slots take turns."""
        outputs, read, start = [], NO_STATE, 0
        for number, end in enumerate(cuts):
            write = 1 + number % 2
            outputs.append(self.run(self.x[start:end], slots(read), slots(write), slots(0, end - start)))
            read, start = write, end
        return torch.cat(outputs)

    def expected(self) -> Tensor:
        """The same of the whole sequence by PyTorch's convolution."""
        b, c, x = self.x.chunk(3, dim=1)
        padded = torch.nn.functional.pad((b * x).float().T, (self.shape.taps - 1, 0))
        conv = torch.nn.functional.conv1d(padded[None], self.weight.T[:, None], groups=self.shape.channels)[0].T
        return c * conv.to(self.dtype)


@shapes
@pytest.mark.parametrize("how", [short_conv_torch, on_triton])
def test_torch_and_triton_convolve(shape: ShortConvShape, how: Callable[..., Tensor]) -> None:
    layer = Layer(shape, torch.float32, how)
    torch.testing.assert_close(layer.in_chunks(37), layer.expected(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.in_chunks(1, 2, 20, 37), layer.expected(), atol=1e-5, rtol=1e-5)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier")
def test_library_agrees_with_torch(shape: ShortConvShape, dtype: torch.dtype) -> None:
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 2e-2}
    ours, plain = Layer(shape, dtype), Layer(shape, dtype, short_conv_torch)
    torch.testing.assert_close(ours.in_chunks(37), plain.in_chunks(37), **tolerance)
    assert torch.equal(ours.state.tail[1], plain.state.tail[1])


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier", "threads")
def test_any_cut_and_any_threads_give_the_same_bits(shape: ShortConvShape, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    whole = layer.in_chunks(37)
    for cuts in ([1, 2, 3, 4, 37], [2, 18, 19, 37], list(range(1, 38))):
        assert torch.equal(layer.in_chunks(*cuts), whole)
    torch.set_num_threads(1)
    assert torch.equal(layer.in_chunks(20, 37), whole)


def assert_company_changes_no_bit(layer: Layer) -> None:
    """Sequences of 1, 5, 0 and 31 rows in one step, of which three continue; all three read the same state."""
    layer.run(layer.x[:6], slots(NO_STATE), slots(3), slots(0, 6))
    alone = [
        layer.run(layer.x[6:7], slots(3), slots(4), slots(0, 1)),
        layer.run(layer.x[7:12], slots(3), slots(5), slots(0, 5)),
        layer.run(layer.x[6:37], slots(NO_STATE), slots(6), slots(0, 31)),
    ]
    state = layer.state.tail[4:7].clone()
    together = layer.run(
        torch.cat((layer.x[6:7], layer.x[7:12], layer.x[6:37])), slots(3, 3, 3, NO_STATE), slots(7, 8, 9, 10),
        slots(0, 1, 6, 6, 37),
    )  # fmt: skip
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(state, layer.state.tail[[7, 8, 10]])
    assert layer.state.tail[9].isnan().all(), "a sequence without rows writes nothing"


@needs_library
@dtypes
@pytest.mark.usefixtures("tier")
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    assert_company_changes_no_bit(Layer(SHAPES[1], dtype))


@pytest.mark.parametrize("dtype", TRITON_DTYPES[:2])
def test_triton_gives_the_same_bits_in_any_cut_and_company(dtype: torch.dtype) -> None:
    layer = Layer(SHAPES[1], dtype, on_triton)
    whole = layer.in_chunks(37)
    for cuts in ([1, 2, 3, 4, 37], [2, 18, 19, 37]):
        assert torch.equal(layer.in_chunks(*cuts), whole)
    assert_company_changes_no_bit(layer)
