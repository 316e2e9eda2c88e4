"""The output gate of attention: what attention gives is multiplied by the sigmoid of a linear of the same input."""

from torch import Tensor


def output_gate_torch(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate). The sigmoid is rounded to x's dtype before the multiplication.

    x, gate [T, N] contiguous, of one dtype.
    """
    return x * gate.sigmoid()
