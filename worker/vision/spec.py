"""The description of a vision tower as data. families.py makes it from the files of a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.images import MAX_PATCHES
from worker.checkpoint.checkpoint import CheckpointError
from worker.checkpoint.stored_weight import (
    PLAIN,
    PlainWeight,
    Shape,
    StoredTensors,
    StoredWeight,
    WeightSource,
    check_read,
    check_tensors,
)
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
    bidirectional: bool = False  # whether the tokens of an image attend to each other in both directions
    frames: int = 1  # how often a patch is repeated, as the frames of a film that stands still
    position_side: int = 0  # side of the grid of learned positions that is stretched over images; 0: there is none
    position_corners: bool = True  # whether the grid's corners are the image's; else it is resized like an image
    position_axes: int = 0  # number of rows, and of columns, of patches with learned positions; 0: there are none
    rotary_theta: float = 0.0  # base of the rotary embeddings by a patch's row and column; 0: there are none
    rotary_alternate: bool = False  # whether rows and columns take the frequencies in turn; else both take the same
    sections: tuple[int, int, int] | None = None  # M-RoPE: how many pairs of a head rotate by time, row and column
    sections_alternate: bool = True  # whether pairs of different sections alternate; else sections are adjacent
    gated: bool = False  # whether the MLPs have a gate
    window: int = 0  # side, in patches, of the windows within which patches attend to each other; 0: to the whole image
    whole_layers: tuple[int, ...] = ()  # layers without windows, where patches see the whole image
    layout: Layout = "siglip"  # how the checkpoint names tensors, see below
    connector_eps: float = 0.0  # eps of the norm before the connector "merge"; 0: there is no norm
    connector_biased: bool = True  # whether the linears of the connector "merge" have biases
    connector_size: int = 0  # width of vectors between linears of "merge"; 0: the width of a square's joined patches
    joined_eps: float = 0.0  # eps of the layer norm of a square's patches before "merge"; 0: there is no norm
    row_ends: bool = False  # whether a text token stands between two rows of an image's tokens
    clamped: bool = False  # whether the checkpoint has ranges to clamp the inputs and outputs of linears
    standardized: bool = False  # whether the connector "scaled_pool" applies a bias and a scale to the averages
    stands_in: int | None = None  # the id whose per-layer embeddings an image's tokens have; None: the placeholder's
    most_tokens: int = 0  # limit for images of any size whose tokens attend to each other; 0: there is no limit
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


# The names of a tower's tensors in a checkpoint, without the prefix of the layout.


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """Each field names a module or tensor. The names of a layer's tensors follow `layers` and the layer's index.

    positions, first_norm, last_norm: "" if a tower has none
    biased, layers_biased: whether the convolution over patches has a bias, and whether the linears of layers have
    rms: whether the norms are RMS norms, which have no bias
    projections: the connector's linears in order, as endings of names anywhere in the checkpoint. If `bare`, they name
    tensors, else modules with a weight and a bias.
    """

    patches: str
    positions: str
    layers: str
    norms: tuple[str, str]  # the norm before attention, and the norm before the MLP
    qkv: tuple[str, ...]  # linears whose rows are concatenated in this order
    out: str
    up: tuple[str, ...]  # linears whose rows are concatenated in this order
    down: str
    last_norm: str
    bare: bool
    projections: tuple[str, ...] = ()
    joined_norm: str = ""  # a norm of a square's patches before `projections`; only if VisionSpec.joined_eps is set
    biased: bool = True
    layers_biased: bool = True
    first_norm: str = ""
    rms: bool = False
    colours_last: bool = False  # whether the patch embedding is a linear whose inputs have the colours last
    deepstack: str = ""  # name of the list of deepstack connectors; every connector has a norm
    unread: tuple[str, ...] = ()  # tensors of the tower that a model for text generation does not need


_SIGLIP = {
    "patches": "embeddings.patch_embedding", "positions": "embeddings.position_embedding.weight",
    "layers": "encoder.layers.", "norms": ("layer_norm1", "layer_norm2"),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "out": "self_attn.out_proj",
    "up": ("mlp.fc1",), "down": "mlp.fc2", "last_norm": "post_layernorm", "unread": ("head.",),
}  # fmt: skip
_QWEN = {
    "patches": "patch_embed.proj", "layers": "blocks.", "norms": ("norm1", "norm2"), "qkv": ("attn.qkv",),
    "out": "attn.proj", "bare": False,
}  # fmt: skip
NAMES: Mapping[Layout, TowerNames] = {
    "siglip": TowerNames(**_SIGLIP, bare=True),  # type: ignore[arg-type]
    "siglip2": TowerNames(
        **_SIGLIP, bare=False, colours_last=True, joined_norm="multi_modal_projector.layer_norm",  # type: ignore[arg-type]
        projections=("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
    ),
    "qwen3": TowerNames(
        **_QWEN, positions="pos_embed.weight", up=("mlp.linear_fc1",), down="mlp.linear_fc2",  # type: ignore[arg-type]
        last_norm="merger.norm", projections=("merger.linear_fc1", "merger.linear_fc2"),
        deepstack="deepstack_merger_list.",
    ),
    "qwen2_5": TowerNames(
        **_QWEN, positions="", up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj",  # type: ignore[arg-type]
        last_norm="merger.ln_q", projections=("merger.mlp.0", "merger.mlp.2"), biased=False, rms=True,
    ),
    "pixtral": TowerNames(
        patches="patch_conv", first_norm="ln_pre", positions="", layers="transformer.layers.",
        norms=("attention_norm", "ffn_norm"), qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.o_proj", up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj",
        last_norm="", bare=False, rms=True, biased=False, layers_biased=False,
        projections=("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"),
    ),
}  # fmt: skip
APART = ("attn.q", "attn.k", "attn.v")  # names in older GGUF files of Qwen models, which have no "attn.qkv"
FRAMES = (".weight", ".weight.1")  # in Qwen's GGUF files, the patch embedding has a tensor for each of two frames
PROJECTIONS: Mapping[Connector, tuple[str, ...]] = {  # TowerNames.projections, where they depend on the connector
    "shuffle": ("modality_projection.proj.weight",), "pool": ("mm_input_projection_weight",),
}  # fmt: skip
# Parts of the connector "merge" in some checkpoints: the linear that joins a square's patches, and the norm before it.
MERGER, MERGER_NORM = "patch_merger.merging_layer.weight", "multi_modal_projector.norm.weight"
SOFT_NORM = "mm_soft_emb_norm.weight"  # the norm of the average that "pool" projects


# Finds and reads single tensors of a tower by the ends of their names, because each layout has its own prefix.

Read = Callable[[str], Tensor]


def before(tensors: StoredTensors, ending: str) -> str | None:
    """Returns the prefix of the tensor whose name has this ending; None if no tensor has it."""
    found = (name.removesuffix(ending) for name in tensors.names() if f".{name}".endswith(f".{ending}"))
    return min(found, key=len, default=None)


@dataclass(frozen=True, slots=True)
class TowerReader:
    """Reads tensors of a checkpoint in `dtype` to a device."""

    source: WeightSource
    dtype: torch.dtype
    device: torch.device

    def found(self, ending: str) -> str:
        """Returns the full name of the tensor with this ending. Raises CheckpointError if there is none."""
        first = before(self.source.tensors, ending)
        if first is None:
            raise CheckpointError(f"{self.source.tensors.folder}: tensor {ending} is missing")
        return first + ending

    def weight(self, name: str, shape: Shape) -> StoredWeight:
        """Returns the stored form of a tensor: plain numbers, or blocks of a GGUF file."""
        low_bit = name in self.source.tensors and self.source.tensors.format(name) not in PLAIN
        return self.source.weight(name, shape) if low_bit and len(shape) == 2 else PlainWeight(name, shape)

    def nbytes(self, shapes: Mapping[str, Shape]) -> int:
        """Returns how many bytes tensors of these shapes take."""
        return sum(map(prod, shapes.values())) * self.dtype.itemsize

    def read(self, shapes: Mapping[str, Shape], prefix: str, unread: tuple[str, ...] = ()) -> Read:
        """Checks the tensors of a tower, and returns a function that reads one by its name.

        shapes: the shapes of all tensors that will be read
        prefix: the prefix of the names of the tower's tensors
        unread: beginnings of the names of tensors that may exist but are not read

        Raises CheckpointError if a tensor is missing or superfluous, or has a wrong shape.
        """
        check_tensors(self.source, [self.weight(*each) for each in shapes.items()], prefix, unread)

        def copied(name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
            into = torch.empty(shape, dtype=dtype, device=self.device)
            self.source.tensors.copy(name, into)
            check_read(into, name, self.source.tensors)
            return into

        def read(name: str) -> Tensor:
            found = self.weight(name, shapes[name]).read(copied, self.dtype)
            return found if isinstance(found, Tensor) else found.dequantize(self.dtype)

        return read
