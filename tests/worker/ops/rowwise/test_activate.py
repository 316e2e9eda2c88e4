from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.pairs import in_pairs
from tests.worker.ops.harness.cases import TRITON_DTYPES, close, random
from tests.worker.ops.harness.cpu_tiers import FUNCTIONS, needs_library, tier  # noqa: F401
from worker.ops.activation import activate
from worker.ops.activation import native as activation_native
from worker.ops.activation.reference import PLAIN, activate_torch
from worker.spec import ACTIVATIONS, Activation

XIELU = torch.tensor([0.8, 1.3, 0.5, -1e-6])


def parameters_of(activation: Activation) -> Tensor | None:
    return XIELU if activation == "xielu" else None


def formula(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "silu":
            return x * x.sigmoid()
        case "gelu_tanh":
            return 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())
        case "gelu":
            return 0.5 * x * torch.special.erfc(-x / 2**0.5)
        case "relu2":
            return x.clamp(min=0) ** 2
        case _:
            alpha_p, alpha_n, beta, eps = XIELU.double()
            curved = torch.where(x > 0, alpha_p * x * x, alpha_n * (torch.expm1(x.clamp(max=eps)) - x))
            return curved + beta * x


@pytest.mark.parametrize("function", [activate, activate_torch])
@pytest.mark.parametrize("activation", PLAIN)
def test_activate_follows_the_formula(activation: Activation, function: Callable[..., Tensor]) -> None:
    x = random(3, 40) * 4
    close(function(x, activation, parameters_of(activation)), formula(x.double(), activation).float())


@needs_library
@pytest.mark.usefixtures("tier")
@in_pairs(FUNCTIONS | {"activation": PLAIN, "rows, width": [(1, 5), (3, 100), (40, 1024)]}, indirect=["tier"])
def test_library_agrees_with_torch(activation: Activation, dtype: torch.dtype, rows: int, width: int) -> None:
    x, number, parameters = (
        random(rows, width, dtype=dtype) * 4,
        ACTIVATIONS.index(activation),
        parameters_of(activation),
    )
    ours = activation_native.activate(x, number, parameters)
    close(ours, activate_torch(x, activation, parameters))
    assert torch.equal(activation_native.activate(x[:1], number, parameters), ours[:1])


@pytest.mark.parametrize("activation", PLAIN)
def test_large_and_small_inputs_and_nan(activation: Activation) -> None:
    x = torch.tensor([[-1e4, -200.0, -0.3, -1e-3, -1e-5, -1e-8, 0.0, 1e-8, 1e-3, 90.0, 1e4, torch.nan] + [1.0] * 6])
    ours = activate(x, activation, parameters_of(activation))
    expected = formula(x.double(), activation).float()
    torch.testing.assert_close(ours, expected, atol=1e-30, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("activation", PLAIN)
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter warns, but 1 / (1 + inf) is right
def test_activate_triton_agrees_with_torch(activation: Activation, dtype: torch.dtype, device: str) -> None:
    from worker.ops.activation.triton import activate_triton

    x, parameters = random(3, 1100, dtype=dtype, device=device) * 4, parameters_of(activation)
    parameters = None if parameters is None else parameters.to(device)
    close(activate_triton(x, activation, parameters), activate_torch(x, activation, parameters))
