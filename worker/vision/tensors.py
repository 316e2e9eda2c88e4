"""The names of a tower's tensors in a checkpoint, without the prefix of the layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

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
from worker.vision.spec import Connector, Layout


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
