"""What recurrent layers have besides linears, for the loop over the layers in C (decoder_c.py)."""

from ctypes import Structure
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from worker.kernels.cpu import delta_net, mamba2, short_conv

if TYPE_CHECKING:
    from worker.kernels.delta_net import DeltaNetShape, DeltaNetWeights
    from worker.kernels.mamba2 import Mamba2Shape, Mamba2Weights
    from worker.kernels.recurrent_state import RecurrentState


@dataclass(frozen=True, slots=True)
class DeltaC:
    """Of the gated delta rule. In all of these classes, `field` is the name in struct Layer of csrc/decoder.c."""

    field: ClassVar[str] = "delta"
    weights: "DeltaNetWeights"
    shape: "DeltaNetShape"
    state: "RecurrentState"

    def struct(self, eps: float) -> Structure:
        """Returns what the C library reads. It is valid as long as the weights and the state."""
        return delta_net.layer_struct(self.weights, self.shape, self.state, eps)

    @property
    def row_floats(self) -> int:
        """How much scratch memory each row of a step needs, in floats."""
        return delta_net.scratch_floats(self.shape)


@dataclass(frozen=True, slots=True)
class MambaC:
    """Of Mamba-2."""

    field: ClassVar[str] = "mamba"
    weights: "Mamba2Weights"
    shape: "Mamba2Shape"
    state: "RecurrentState"

    def struct(self, eps: float) -> Structure:
        return mamba2.layer_struct(self.weights, self.shape, self.state, eps)

    @property
    def row_floats(self) -> int:
        return mamba2.scratch_floats(self.shape)


@dataclass(frozen=True, slots=True)
class ConvC:
    """Of a short convolution."""

    field: ClassVar[str] = "conv"
    weight: Tensor  # [taps, H] float32
    state: "RecurrentState"

    def struct(self, eps: float) -> Structure:
        return short_conv.layer_struct(self.weight, self.state)

    @property
    def row_floats(self) -> int:
        return short_conv.scratch_floats(self.weight.shape[1])


RecurrentC = DeltaC | MambaC | ConvC
