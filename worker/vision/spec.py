"""What a vision tower is, as data. families.py makes a spec from the files of a checkpoint."""

from dataclasses import dataclass
from typing import Literal

from worker.kernels.rowwise.activate import Activation

Connector = Literal["shuffle", "pool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A SigLIP tower, and the connector behind it. Pictures are squares of one size.

    The patches of a picture that do not fill the last row or column of patches are left out, as a convolution does.
    """

    image_size: int  # height and width of a picture in pixels
    patch_size: int  # height and width of a patch in pixels
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    norm_eps: float
    activation: Activation
    connector: Connector  # of connectors.py
    bucketed: bool  # whether a patch's position is looked up by its place as a fraction of the side (weights.py)
    side: int  # height and width of the square of patches that becomes one token
    text_size: int  # hidden size of the text model
    placeholder: int  # the token id that a picture's tokens have in a prompt
    bidirectional: bool  # whether the tokens of a picture also see those after them, up to the picture's end
    rescale: float  # a pixel x becomes (x * rescale - mean) / std
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def grid(self) -> int:
        """The number of patches along a side of a picture."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """The number of tokens that a picture fills in a prompt."""
        return (self.grid // self.side) ** 2

    @property
    def patch_width(self) -> int:
        return 3 * self.patch_size**2
