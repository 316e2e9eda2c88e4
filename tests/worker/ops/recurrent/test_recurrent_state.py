import pytest
import torch

from worker.ops.recurrent_state import DeltaNetShape, Mamba2Shape, RecurrentState, ShortConvShape
from worker.spec import RecurrentShape


@pytest.mark.parametrize(
    "shape", [DeltaNetShape(2, 4, 16, 24, 4), Mamba2Shape(4, 24, 2, 16, 4), ShortConvShape(64, 3)], ids=str
)
def test_state_has_the_sizes_of_its_shape(shape: RecurrentShape) -> None:
    state = RecurrentState.zeros(shape, 5, torch.bfloat16, torch.device("cpu"))
    assert state.tail.shape == (5, *shape.tail) and state.tail.dtype == torch.bfloat16
    assert state.memory.shape == (5, shape.memory) and state.memory.dtype == torch.float32
    assert not state.tail.any() and not state.memory.any()


def test_a_short_convolution_keeps_its_last_inputs_only() -> None:
    assert (ShortConvShape(64, 3).tail, ShortConvShape(64, 3).memory) == ((2, 64), 0)
