"""The output gate of attention: the output of attention is multiplied by the sigmoid of a linear projection of
attention's input.
"""

from torch import Tensor


def output_gate_torch(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate). The sigmoid is rounded to x's dtype before the multiplication.

    x, gate [T, N] contiguous, with the same dtype.
    """
    return x * gate.sigmoid()
