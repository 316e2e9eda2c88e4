"""The gated delta rule agrees with transformers, and has the same bits however a prompt is cut, in any company."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from tests.worker.ops.harness import recurrent
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library, tier
from worker.ops.recurrent import delta_net
from worker.ops.recurrent import native as in_c
from worker.ops.recurrent.reference import DeltaNetWeights, delta_net_torch
from worker.ops.recurrent_state import DeltaNetShape, StateSlots

__all__ = ["tier"]

EPS = 1e-6
SHAPES = [
    DeltaNetShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32, taps=4),
    DeltaNetShape(key_heads=3, value_heads=3, key_dim=13, value_dim=70, taps=2),
    DeltaNetShape(key_heads=1, value_heads=2, key_dim=128, value_dim=128, taps=4),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Layer(recurrent.RecurrentLayer):
    def __init__(
        self, shape: DeltaNetShape, dtype: torch.dtype, rows: int = 37, how: Callable[..., Tensor] = delta_net
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.how = shape, how
        self.weights = DeltaNetWeights(
            conv=torch.randn(shape.taps, shape.channels), decay=-4 * torch.rand(shape.value_heads),
            dt_bias=torch.randn(shape.value_heads), norm=torch.randn(shape.value_dim).to(dtype),
        )  # fmt: skip
        super().__init__(shape, torch.randn(rows, sum(shape.projected) + sum(shape.gates)).to(dtype))

    def run(self, x: Tensor, slots: StateSlots) -> Tensor:
        parts = x.split_with_sizes([sum(self.shape.projected), sum(self.shape.gates)], dim=1)
        return self.how(*(part.contiguous() for part in parts), self.weights, self.shape, self.state, slots, EPS)

    def by_transformers(self) -> Tensor:
        """Computes the whole sequence with transformers' loop over tokens."""
        shape, weights = self.shape, self.weights
        mixed, z, b, a = self.x.float().split_with_sizes([*shape.projected, *shape.gates], dim=1)
        padded = torch.nn.functional.pad(mixed.T, (shape.taps - 1, 0))
        conv = torch.nn.functional.conv1d(padded[None], weights.conv.T[:, None], groups=shape.channels)[0].T
        q, k, v = torch.nn.functional.silu(conv).split_with_sizes((shape.keys, shape.keys, shape.values), dim=1)
        heads = [x.unflatten(1, (count, -1))[None] for x, count in ((q, shape.key_heads), (k, shape.key_heads))]
        g = weights.decay * torch.nn.functional.softplus(a + weights.dt_bias)
        out, _ = torch_recurrent_gated_delta_rule(
            *heads, v.unflatten(1, (shape.value_heads, -1))[None], g[None], b.sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        normed = torch.nn.functional.rms_norm(out[0], (shape.value_dim,), weights.norm.float(), EPS)
        return normed.flatten(1) * torch.nn.functional.silu(z)


def on_triton(*args: Tensor) -> Tensor:
    from worker.ops.recurrent.triton import delta_net_triton

    return delta_net_triton(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize(("how", "rows"), [(delta_net_torch, 37), (on_triton, 7)])
@shapes
def test_torch_and_triton_compute_what_transformers_computes(
    shape: DeltaNetShape, how: Callable[..., Tensor], rows: int
) -> None:
    layer = Layer(shape, torch.float32, rows, how)
    torch.testing.assert_close(layer.in_chunks([rows]), layer.by_transformers(), atol=2e-5, rtol=1e-4)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier")
def test_library_computes_what_transformers_computes(shape: DeltaNetShape, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    assert in_c.supports_delta_net(dtype, shape)
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(layer.in_chunks([37]).float(), layer.by_transformers(), **tolerance)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier", "threads")
def test_any_cut_and_any_threads_give_the_same_bits(shape: DeltaNetShape, dtype: torch.dtype) -> None:
    recurrent.assert_any_cut_and_any_threads_give_the_same_bits(Layer(shape, dtype))


@needs_library
@dtypes
@pytest.mark.usefixtures("tier")
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    recurrent.assert_company_changes_no_bit(Layer(SHAPES[0], dtype))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_triton_gives_the_same_bits_in_any_cut_and_company(shape: DeltaNetShape) -> None:
    recurrent.assert_cuts_and_a_twin_change_no_bit(Layer(shape, torch.float32, 9, on_triton))


@needs_library
@dtypes
def test_a_step_can_be_repeated(dtype: torch.dtype) -> None:
    recurrent.assert_a_step_can_be_repeated(Layer(SHAPES[0], dtype))
