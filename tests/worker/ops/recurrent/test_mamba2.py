"""Mamba-2 agrees with its formula over all tokens, and has the same bits however a prompt is cut, in any company."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.worker.ops.harness import recurrent
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library, tier
from worker.ops.recurrent import mamba2
from worker.ops.recurrent import native as in_c
from worker.ops.recurrent.reference import Mamba2Weights, mamba2_torch
from worker.ops.recurrent_state import Mamba2Shape, StateSlots

__all__ = ["tier"]

EPS = 1e-6
SHAPES = [
    Mamba2Shape(heads=4, head_dim=32, groups=2, state_size=16, taps=4),
    Mamba2Shape(heads=3, head_dim=70, groups=1, state_size=13, taps=2),
    Mamba2Shape(heads=2, head_dim=64, groups=1, state_size=300, taps=4),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Layer(recurrent.RecurrentLayer):
    def __init__(
        self, shape: Mamba2Shape, dtype: torch.dtype, rows: int = 37, how: Callable[..., Tensor] = mamba2
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.how = shape, how
        self.weights = Mamba2Weights(
            conv=torch.randn(shape.taps, shape.channels), conv_bias=torch.randn(shape.channels),
            decay=-4 * torch.rand(shape.heads), dt_bias=torch.randn(shape.heads), skip=torch.randn(shape.heads),
            norm=torch.randn(shape.values).to(dtype),
        )  # fmt: skip
        super().__init__(shape, torch.randn(rows, sum(shape.projected) + shape.heads).to(dtype))

    def run(self, x: Tensor, slots: StateSlots) -> Tensor:
        parts = x.split_with_sizes([sum(self.shape.projected), self.shape.heads], dim=1)
        return self.how(*(part.contiguous() for part in parts), self.weights, self.shape, self.state, slots, EPS)

    def at_once(self) -> Tensor:
        """Computes the whole sequence without a state: the sum over all earlier tokens, each with its decay."""
        shape, weights = self.shape, self.weights
        gates, mixed, steps = self.x.double().split_with_sizes([*shape.projected, shape.heads], dim=1)
        padded = F.pad(mixed.T, (shape.taps - 1, 0))
        kernels, bias = weights.conv.double().T[:, None], weights.conv_bias.double()
        convolved = F.silu(F.conv1d(padded[None], kernels, bias, groups=shape.channels)[0].T)
        x, b, c = convolved.split_with_sizes(shape.mixed, dim=1)
        x, dt = x.unflatten(1, (shape.heads, -1)), F.softplus(steps + weights.dt_bias)
        repeats = shape.heads // shape.groups
        b, c = (part.unflatten(1, (shape.groups, -1)).repeat_interleave(repeats, 1) for part in (b, c))
        decays = (dt * weights.decay).cumsum(0)
        earlier = torch.ones(len(x), len(x)).tril().bool()[:, :, None]
        share = torch.where(earlier, (decays[:, None] - decays[None, :]).exp(), 0.0)
        out = torch.einsum("thn,shn,tsh,sh,shp->thp", c, b, share, dt, x) + weights.skip[:, None] * x
        gated = (out.flatten(1) * F.silu(gates)).unflatten(1, (shape.groups, -1))
        normed = gated / (gated.square().mean(2, keepdim=True) + EPS).sqrt()
        return (normed.flatten(1) * weights.norm.double()).float()


def on_triton(*args: Tensor) -> Tensor:
    from worker.ops.recurrent.triton import mamba2_triton

    return mamba2_triton(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [mamba2_torch, on_triton])
@shapes
def test_torch_and_triton_compute_the_formula(shape: Mamba2Shape, how: Callable[..., Tensor]) -> None:
    layer = Layer(shape, torch.float32, rows=9, how=how)
    torch.testing.assert_close(layer.in_chunks([9]), layer.at_once(), atol=5e-5, rtol=1e-4)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier")
def test_library_computes_the_formula(shape: Mamba2Shape, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    assert in_c.supports_mamba2(dtype, shape)
    tolerance = {"atol": 5e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(layer.in_chunks([37]).float(), layer.at_once(), **tolerance)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier", "threads")
def test_any_cut_and_any_threads_give_the_same_bits(shape: Mamba2Shape, dtype: torch.dtype) -> None:
    recurrent.assert_any_cut_and_any_threads_give_the_same_bits(Layer(shape, dtype))


@needs_library
@dtypes
@pytest.mark.usefixtures("tier")
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    recurrent.assert_company_changes_no_bit(Layer(SHAPES[0], dtype))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_triton_gives_the_same_bits_in_any_cut_and_company(shape: Mamba2Shape) -> None:
    recurrent.assert_cuts_and_a_twin_change_no_bit(Layer(shape, torch.float32, 9, on_triton))


@needs_library
@dtypes
def test_a_step_can_be_repeated(dtype: torch.dtype) -> None:
    recurrent.assert_a_step_can_be_repeated(Layer(SHAPES[0], dtype))
