import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.worker.ops.harness.cases import TRITON_DTYPES, close, random, rope_tables
from worker.ops.rope import rotary
from worker.ops.rope.reference import apply_rope, rotary_torch


@pytest.mark.parametrize("function", [rotary, rotary_torch])
def test_rotary_rotates_pairs_by_the_angle_of_their_position(function: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Dimensions i and i + D / 2 form a complex number, so complex multiplication is the oracle."""
    q, k = random(4, 3, 8), random(4, 1, 8, seed=1)
    positions = torch.tensor([5, 0, 5, 9])
    cos, sin = rope_tables(10, 8)
    factor = torch.polar(torch.ones(4, 1, 4), torch.atan2(sin, cos)[positions, None, :4])
    for x, turned in zip((q, k), function(q, k, cos, sin, positions), strict=True):
        expected = torch.complex(x[..., :4], x[..., 4:]) * factor
        close(turned, torch.cat((expected.real, expected.imag), dim=-1))


def test_scores_depend_on_the_distance_only() -> None:
    q, k = random(1, 1, 16).expand(2, 1, 16), random(1, 1, 16, seed=1).expand(2, 1, 16)
    cos, sin = rope_tables(40, 16)
    turned_q, _ = rotary(q, k, cos, sin, torch.tensor([7, 37]))
    _, turned_k = rotary(q, k, cos, sin, torch.tensor([2, 32]))
    near, far = (turned_q * turned_k).sum(-1).flatten().tolist()
    assert math.isclose(near, far, rel_tol=1e-4, abs_tol=1e-4)


def test_half_precision_is_rounded_once() -> None:
    q, k = random(3, 2, 16, dtype=torch.bfloat16), random(3, 1, 16, dtype=torch.bfloat16, seed=1)
    cos, sin = rope_tables(8, 16)
    positions = torch.tensor([1, 4, 7])
    wide = rotary_torch(q.float(), k.float(), cos, sin, positions)
    for got, expected in zip(rotary_torch(q, k, cos, sin, positions), wide, strict=True):
        assert torch.equal(got, expected.bfloat16())


@pytest.mark.parametrize("own_tables", [False, True])
def test_batched_form_with_shared_and_own_tables(own_tables: bool) -> None:
    q, k = random(2, 3, 5, 16), random(2, 1, 5, 16, seed=1)
    cos, sin = rope_tables(30, 16)
    positions = torch.tensor([[3, 4, 5, 6, 7], [20, 21, 22, 23, 24]] if own_tables else [[0, 1, 2, 3, 4]] * 2)
    chosen = (cos[positions], sin[positions]) if own_tables else (cos[:5], sin[:5])
    turned_q, turned_k = apply_rope(q, k, *chosen)
    for b in range(2):
        alone = rotary_torch(q[b].transpose(0, 1), k[b].transpose(0, 1), cos, sin, positions[b])
        assert torch.equal(turned_q[b].transpose(0, 1), alone[0])
        assert torch.equal(turned_k[b].transpose(0, 1), alone[1])


def test_apply_rope_with_tables_of_another_rank_raises_value_error() -> None:
    with pytest.raises(ValueError, match="cos must be"):
        apply_rope(random(1, 1, 2, 8), random(1, 1, 2, 8), torch.ones(8), torch.ones(8))


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 1, 96), (1, 1, 16)])
def test_rotary_triton_agrees_with_torch(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: str) -> None:
    from worker.ops.rope.triton import rotary_triton

    fused = random(6, heads + kv_heads + 1, size, dtype=dtype, device=device)
    q, k = fused[:, :heads], fused[:, heads : heads + kv_heads]
    cos, sin = rope_tables(50, size, device)
    positions = torch.tensor([0, 49, 3, 3, 17, 1], device=device)
    got = rotary_triton(q, k, cos, sin, positions)
    for turned, expected in zip(got, rotary_torch(q, k, cos, sin, positions), strict=True):
        close(turned, expected)
