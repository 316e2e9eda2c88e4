"""PyTorch's functions that a step calls on all rows together, where there is no form in C: no row depends on others.

Other functions of PyTorch, such as sigmoid, SiLU, GELU and softplus, compute the last numbers of a tensor by other code
than the rest. So do not call them on rows whose bits must not depend on the load.
"""

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,  # of sampling
    "tanh": torch.tanh,  # of the cap of logits
    "log_softmax": lambda x: x.log_softmax(-1),  # of log-probabilities
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_row_has_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    draw, function = Random(0), FUNCTIONS[name]
    for width in (1, 7, 33, 70, 500, 1000):
        x = torch.randn(20, width, generator=torch.Generator().manual_seed(width)).to(dtype)
        whole = function(x)
        for _ in range(10):
            begin, end = sorted(draw.sample(range(21), 2))
            assert torch.equal(function(x[begin:end]), whole[begin:end])
            assert torch.equal(function(x[begin:end].clone()), whole[begin:end])
