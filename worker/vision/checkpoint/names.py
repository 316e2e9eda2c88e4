"""The names of a tower's tensors in a checkpoint, behind the prefix of its layout."""

from collections.abc import Mapping
from dataclasses import dataclass

from worker.vision.spec import Connector


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """Each field names a module or tensor; those of a layer stand behind `layers` and its index.

    projections: the linears of the connector, in order, found by these endings anywhere in the checkpoint; the names of
    tensors if `bare`, else of modules with a weight and a bias.
    """

    patches: str
    positions: str
    layers: str
    norms: tuple[str, str]  # before attention, and before the MLP
    qkv: tuple[str, ...]  # one after another
    out: str
    up: str
    down: str
    last_norm: str
    projections: tuple[str, ...]
    bare: bool
    deepstack: str = ""  # what stands before the index of a connector behind a layer, which has a norm
    unread: tuple[str, ...] = ()  # what belongs to the tower but not to a model that generates text


_SIGLIP = {
    "patches": "embeddings.patch_embedding", "positions": "embeddings.position_embedding.weight",
    "layers": "encoder.layers.", "norms": ("layer_norm1", "layer_norm2"),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "out": "self_attn.out_proj",
    "up": "mlp.fc1", "down": "mlp.fc2", "last_norm": "post_layernorm", "bare": True, "unread": ("head.",),
}  # fmt: skip
NAMES: Mapping[Connector, TowerNames] = {
    "shuffle": TowerNames(**_SIGLIP, projections=("modality_projection.proj.weight",)),  # type: ignore[arg-type]
    "pool": TowerNames(**_SIGLIP, projections=("mm_input_projection_weight",)),  # type: ignore[arg-type]
    "merge": TowerNames(
        patches="patch_embed.proj", positions="pos_embed.weight", layers="blocks.", norms=("norm1", "norm2"),
        qkv=("attn.qkv",), out="attn.proj", up="mlp.linear_fc1", down="mlp.linear_fc2", last_norm="merger.norm",
        projections=("merger.linear_fc1", "merger.linear_fc2"), bare=False, deepstack="deepstack_merger_list.",
    ),
}  # fmt: skip
SOFT_NORM = "mm_soft_emb_norm.weight"  # of the average that "pool" projects
