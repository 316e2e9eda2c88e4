"""The names of a tower's tensors in a checkpoint, without the prefix of the layout."""

from collections.abc import Mapping
from dataclasses import dataclass

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
