"""The gated delta rule: as transformers computes it, and the same bits in any cut of a prompt and any company."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from tests.worker.kernels.harness.cpu_tiers import dtypes, needs_library, tier
from tests.worker.kernels.harness.recurrent import assert_company_changes_no_bit, in_chunks, slots
from worker.kernels.cpu import delta_net as in_c
from worker.kernels.delta_net import DeltaNetShape, DeltaNetWeights, delta_net, delta_net_torch
from worker.kernels.recurrent_state import NO_STATE, RecurrentState

__all__ = ["tier"]

EPS = 1e-6
CPU = torch.device("cpu")
SHAPES = [
    DeltaNetShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32, taps=4),
    DeltaNetShape(key_heads=3, value_heads=3, key_dim=13, value_dim=70, taps=2),
    DeltaNetShape(key_heads=1, value_heads=2, key_dim=128, value_dim=128, taps=4),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random_weights(shape: DeltaNetShape, dtype: torch.dtype) -> DeltaNetWeights:
    return DeltaNetWeights(
        conv=torch.randn(shape.taps, shape.channels),
        decay=-4 * torch.rand(shape.value_heads),
        dt_bias=torch.randn(shape.value_heads),
        norm=torch.randn(shape.value_dim).to(dtype),
    )


class Layer:
    """A layer with its states, and inputs of one sequence."""

    def __init__(self, shape: DeltaNetShape, dtype: torch.dtype, rows: int = 37) -> None:
        torch.manual_seed(0)
        self.shape, self.weights = shape, random_weights(shape, dtype)
        self.state = RecurrentState.zeros(shape, 16, dtype, CPU)
        self.state.memory.fill_(torch.nan)  # what no one wrote must not be read
        self.state.tail.fill_(torch.nan)
        self.x = torch.randn(rows, sum(shape.projected) + sum(shape.gates)).to(dtype)

    def parts(self, x: Tensor) -> list[Tensor]:
        """What the input is projected to, in two linears."""
        return [part.contiguous() for part in x.split_with_sizes([sum(self.shape.projected), sum(self.shape.gates)], 1)]

    def run(self, x: Tensor, read: Tensor, write: Tensor, starts: Tensor) -> Tensor:
        return delta_net(*self.parts(x), self.weights, self.shape, self.state, read, write, starts, EPS)

    def in_chunks(self, cuts: list[int]) -> Tensor:
        """The sequence, computed in chunks that end at `cuts`. Two slots take turns."""
        return in_chunks(self.run, self.x, cuts)


def by_transformers(layer: Layer) -> Tensor:
    """The same of one whole sequence, with transformers' loop over tokens."""
    shape, weights = layer.shape, layer.weights
    mixed, z, b, a = layer.x.float().split_with_sizes([*shape.projected, *shape.gates], dim=1)
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


@shapes
def test_torch_computes_what_transformers_computes(shape: DeltaNetShape) -> None:
    layer = Layer(shape, torch.float32)
    rows = len(layer.x)
    got = delta_net_torch(
        *layer.parts(layer.x), layer.weights, shape, layer.state, slots(NO_STATE), slots(1), slots(0, rows), EPS
    )  # fmt: skip
    torch.testing.assert_close(got, by_transformers(layer), atol=2e-5, rtol=1e-4)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier")
def test_library_computes_what_transformers_computes(shape: DeltaNetShape, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    assert in_c.supports(dtype, shape)
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(layer.in_chunks([37]).float(), by_transformers(layer), **tolerance)


@needs_library
@dtypes
@shapes
@pytest.mark.usefixtures("tier", "threads")
def test_any_cut_and_any_threads_give_the_same_bits(shape: DeltaNetShape, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    whole = layer.in_chunks([37])
    for cuts in ([1, 2, 3, 4, 37], [2, 18, 19, 37], list(range(1, 38))):
        assert torch.equal(layer.in_chunks(cuts), whole)
    torch.set_num_threads(1)
    assert torch.equal(layer.in_chunks([20, 37]), whole)


@needs_library
@dtypes
@pytest.mark.usefixtures("tier")
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    layer = Layer(SHAPES[0], dtype)
    assert_company_changes_no_bit(layer.run, layer.x, layer.state)


def on_triton(layer: Layer, x: Tensor, read: Tensor, write: Tensor, starts: Tensor) -> Tensor:
    from worker.kernels.gpu.delta_net import delta_net_triton

    return delta_net_triton(*layer.parts(x), layer.weights, layer.shape, layer.state, read, write, starts, EPS)


@shapes
def test_triton_computes_what_transformers_computes(shape: DeltaNetShape) -> None:
    layer = Layer(shape, torch.float32, rows=7)
    got = on_triton(layer, layer.x, slots(NO_STATE), slots(1), slots(0, 7))
    torch.testing.assert_close(got, by_transformers(layer), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_triton_gives_the_same_bits_in_any_cut_and_company(shape: DeltaNetShape) -> None:
    layer = Layer(shape, torch.float32, rows=9)
    whole = on_triton(layer, layer.x, slots(NO_STATE), slots(1), slots(0, 9))
    parts, read = [], NO_STATE
    for number, (start, end) in enumerate([(0, 1), (1, 3), (3, 4), (4, 9)]):
        parts.append(on_triton(layer, layer.x[start:end], slots(read), slots(2 + number % 2), slots(0, end - start)))
        read = 2 + number % 2
    assert torch.equal(torch.cat(parts), whole)
    twice = on_triton(layer, torch.cat((layer.x, layer.x)), slots(NO_STATE, NO_STATE), slots(5, 6), slots(0, 9, 18))
    assert torch.equal(twice, torch.cat((whole, whole)))
    assert torch.equal(layer.state.memory[5].nan_to_num(), layer.state.memory[read].nan_to_num())
    assert torch.equal(layer.state.tail[6], layer.state.tail[read])


@needs_library
@dtypes
def test_a_step_can_be_repeated(dtype: torch.dtype) -> None:
    layer = Layer(SHAPES[0], dtype)
    layer.run(layer.x[:6], slots(NO_STATE), slots(1), slots(0, 6))
    once = layer.run(layer.x[6:9], slots(1), slots(2), slots(0, 3))
    assert torch.equal(layer.run(layer.x[6:9], slots(1), slots(2), slots(0, 3)), once)
