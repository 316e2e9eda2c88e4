"""The description of a vision tower as data. families.py makes it from the files of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shared.images import MAX_PATCHES
from worker.spec import Activation

VisionActivation = Activation | Literal["gelu"]
# Name in configs → activation. Each tower takes all of them, as its class in transformers does.
VISION_ACTIVATIONS: Mapping[str, VisionActivation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "gelu": "gelu"}
Layout = Literal["siglip", "siglip2", "qwen3", "qwen2_5", "pixtral", "gemma4", "gemma4_unified"]
Connector = Literal["shuffle", "pool", "merge", "scaled_pool", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A vision transformer over patches, and the connector after it.

    Pixels that do not fill the last row or column of patches are left out, as in a convolution.
    """

    image_size: int  # height and width of an image in pixels; 0: any size of whole squares of patches
    patch_size: int  # height and width of a patch in pixels
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    norm_eps: float
    activation: VisionActivation
    connector: Connector  # see encoder.py
    side: int  # height and width of the square of patches that becomes one token
    text_size: int  # hidden size of the text model
    placeholder: int  # the token id that stands for an image's tokens in a prompt
    rescale: float  # a pixel x becomes (x * rescale - mean) / std
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    centred: bool = False  # whether normalized values are then mapped from 0 .. 1 to -1 .. 1
    bucketed: bool = False  # whether positions are found by rounding coordinates between 0 and 1 (weights.py)
    bidirectional: bool = False  # whether the tokens of an image see one another in both directions
    frames: int = 1  # how often a patch is repeated, as the frames of a film that stands still
    position_side: int = 0  # side of the grid of learned positions that is stretched over images; 0: there is none
    position_corners: bool = True  # whether the grid's corners are the image's; else it is resized like an image
    position_axes: int = 0  # number of rows, and of columns, of patches with learned positions; 0: there are none
    rotary_theta: float = 0.0  # base of the rotary embeddings by a patch's row and column; 0: there are none
    rotary_alternate: bool = False  # whether rows and columns take the frequencies in turn; else both take the same
    sections: tuple[int, int, int] | None = None  # M-RoPE: how many pairs of a head rotate by time, row and column
    sections_alternate: bool = True  # whether pairs of different sections alternate; else sections are adjacent
    gated: bool = False  # whether the MLPs have a gate
    window: int = 0  # side, in patches, of the windows in which patches see each other; 0: they see the whole image
    whole_layers: tuple[int, ...] = ()  # layers without windows, where patches see the whole image
    layout: Layout = "siglip"  # how the checkpoint names tensors (tensors.py)
    connector_eps: float = 0.0  # eps of the norm before the connector "merge"; 0: there is no norm
    connector_biased: bool = True  # whether the linears of the connector "merge" have biases
    connector_size: int = 0  # width of vectors between linears of "merge"; 0: the width of a square's joined patches
    joined_eps: float = 0.0  # eps of the layer norm of a square's patches before "merge"; 0: there is no norm
    row_ends: bool = False  # whether a text token stands between two rows of an image's tokens
    clamped: bool = False  # whether the checkpoint has ranges to clamp the inputs and outputs of linears
    standardized: bool = False  # whether the connector "scaled_pool" applies a bias and a scale to the averages
    stands_in: int | None = None  # the id whose per-layer embeddings an image's tokens have; None: the placeholder's
    most_tokens: int = 0  # limit for images of any size whose tokens see each other; 0: there is no limit
    deepstack: tuple[int, ...] = ()  # after these layers a connector makes vectors for the text model's first layers

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns how many rows and columns of patches an image of so many pixels has."""
        return height // self.patch_size, width // self.patch_size

    def squares_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns how many rows and columns of vectors an image has."""
        rows, columns = self.grid_of(height, width)
        return rows // self.side, columns // self.side

    def tokens_of(self, height: int, width: int) -> int:
        """Returns the number of tokens that an image fills in a prompt, including the tokens between its rows."""
        rows, columns = self.squares_of(height, width)
        return rows * columns + (rows - 1 if self.row_ends else 0)

    def places_of(self, height: int, width: int) -> NDArray[np.int64]:
        """Returns where in an image's tokens its vectors stand, in order; the rest are tokens between rows."""
        rows, columns = self.squares_of(height, width)
        step = columns + 1 if self.row_ends else columns
        places: NDArray[np.int64] = (np.arange(rows)[:, None] * step + np.arange(columns)).ravel()
        return places

    def size_problem(self, height: int, width: int) -> str:
        """Returns why no image may have this size, or ""."""
        if self.image_size:
            wrong = (height, width) != (self.image_size, self.image_size)
            return f"this model sees {self.image_size} x {self.image_size}" if wrong else ""
        step = self.patch_size * self.side
        if height < step or width < step or height % step or width % step:
            return f"this model sees multiples of {step}"
        rows, columns = self.grid_of(height, width)
        if self.position_axes and max(rows, columns) > self.position_axes:
            return f"this model sees at most {self.position_axes} patches along a side"
        if self.most_tokens and (tokens := self.tokens_of(height, width)) > self.most_tokens:
            return f"that would be {tokens} tokens; this model sees at most {self.most_tokens}"
        return f"this worker encodes at most {MAX_PATCHES} patches" if rows * columns > MAX_PATCHES else ""

    @property
    def largest_whole(self) -> int:
        """The most tokens of an image that no step may cut in two; 0 if steps may cut images."""
        if not self.bidirectional:
            return 0
        return self.most_tokens or self.tokens_of(self.image_size, self.image_size)

    @property
    def patch_width(self) -> int:
        return 3 * self.frames * self.patch_size**2
