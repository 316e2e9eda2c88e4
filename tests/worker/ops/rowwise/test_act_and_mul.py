from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, random
from worker.ops.activation import act_and_mul
from worker.ops.activation.reference import GATED, act_and_mul_torch
from worker.spec import Activation


@pytest.mark.parametrize("function", [act_and_mul, act_and_mul_torch])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_rms_norm_follows_the_formula(activation: Activation, function: Callable[[Tensor, Activation], Tensor]) -> None:
    x = random(3, 40)
    a, b = x[:, :20].double(), x[:, 20:].double()
    inner = (2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3)
    expected = a * a.sigmoid() if activation == "silu" else 0.5 * a * (1 + inner.tanh())
    close(function(x, activation), (expected * b).float())


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter warns, but 1 / (1 + inf) is right
def test_act_and_mul_triton_agrees_with_torch(activation: Activation, dtype: torch.dtype, device: str) -> None:
    from worker.ops.activation.triton import act_and_mul_triton

    x = random(3, 2 * 1100, dtype=dtype, device=device) * 4
    close(act_and_mul_triton(x, activation), act_and_mul_torch(x, activation))
