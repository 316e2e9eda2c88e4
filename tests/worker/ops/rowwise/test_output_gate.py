import pytest
import torch

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, random
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library, tier  # noqa: F401
from worker.ops.activation import native as activation_native
from worker.ops.activation import output_gate
from worker.ops.activation.reference import output_gate_torch


def test_output_gate_follows_the_formula() -> None:
    x, gate = random(3, 40), random(3, 40, seed=1) * 4
    close(output_gate(x, gate), (x.double() / (1 + (-gate.double()).exp())).float())


@needs_library
@dtypes
@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 100), (40, 1024)])
def test_library_agrees_with_torch(dtype: torch.dtype, rows: int, width: int) -> None:
    x, gate = random(rows, width, dtype=dtype), random(rows, width, seed=1, dtype=dtype) * 8
    ours = activation_native.output_gate(x, gate)
    close(ours, output_gate_torch(x, gate))
    assert torch.equal(activation_native.output_gate(x[:1], gate[:1]), ours[:1])


@needs_library
def test_gates_far_from_zero_open_and_close() -> None:
    x = torch.full((1, 4), 3.0)
    ours = activation_native.output_gate(x, torch.tensor([[-1e4, -200.0, 200.0, 1e4]]))
    torch.testing.assert_close(ours, torch.tensor([[0.0, 0.0, 3.0, 3.0]]), atol=1e-30, rtol=0)


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter warns, but 1 / (1 + inf) is right
def test_output_gate_triton_agrees_with_torch(dtype: torch.dtype, device: str) -> None:
    from worker.ops.activation.triton import output_gate_triton

    x, gate = random(3, 1100, dtype=dtype, device=device), random(3, 1100, seed=1, dtype=dtype, device=device) * 4
    close(output_gate_triton(x, gate), output_gate_torch(x, gate))
