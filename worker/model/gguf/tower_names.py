"""Translates tensor names in the GGUF file of a vision tower ("mmproj") to Hugging Face's names.

The file's kind of projector decides which names its tensors have.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

TOWER, QWEN, PROJECTION = "vision_tower.", "visual.", "multi_modal_projector."
CONNECTOR = "connector."
PREFIXES = (TOWER, QWEN, PROJECTION, CONNECTOR)  # no tensor name of a text model begins with one of these
SOFT_NORM = PROJECTION + "mm_soft_emb_norm.weight"


@dataclass(frozen=True, slots=True)
class TowerNames:
    """The names of a tower's modules in Hugging Face checkpoints, by their names in GGUF.

    whole: the names of modules outside the layers; before: the prefix of these names
    layer: the names of modules inside a layer; layers: the prefix of these names
    """

    before: str
    layers: str
    whole: Mapping[str, str]
    layer: Mapping[str, str]
    connector: Mapping[str, str]  # full names of tensors


_SIGLIP = {
    "patch_embd": "embeddings.patch_embedding", "position_embd": "embeddings.position_embedding",
    "post_ln": "post_layernorm",
}  # fmt: skip
_SIGLIP_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # fmt: skip
_QWEN = {"patch_embd": "patch_embed.proj", "position_embd": "pos_embed"}
_QWEN_LAYER = {
    "attn_qkv": "attn.qkv", "attn_q": "attn.q", "attn_k": "attn.k", "attn_v": "attn.v", "attn_out": "attn.proj",
    "ln1": "norm1", "ln2": "norm2",
}  # fmt: skip


_PIXTRAL_LAYER = {
    "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm", "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
}  # fmt: skip


def _projector(norm: str) -> dict[str, str]:
    """Returns the tensor names of a connector that has two linears. norm: the name of the norm before them"""
    names, kinds = {"mm.1": "linear_1", "mm.2": "linear_2", "mm.input_norm": norm}, ("weight", "bias")
    return {f"{stored}.{kind}": f"{PROJECTION}{name}.{kind}" for stored, name in names.items() for kind in kinds}


def _merger(first: str, second: str) -> dict[str, str]:
    names = {"mm.0": f"{QWEN}merger.{first}", "mm.2": f"{QWEN}merger.{second}"}
    return {f"{stored}.{kind}": f"{name}.{kind}" for stored, name in names.items() for kind in ("weight", "bias")}


NAMES: Mapping[str, TowerNames] = {
    "idefics3": TowerNames(
        TOWER, TOWER + "encoder.layers.", _SIGLIP, _SIGLIP_LAYER,
        {"mm.model.fc.weight": CONNECTOR + "modality_projection.proj.weight"},
    ),
    "gemma3": TowerNames(
        TOWER, TOWER + "encoder.layers.", _SIGLIP, _SIGLIP_LAYER,
        {
            "mm.input_projection.weight": PROJECTION + "mm_input_projection_weight",
            "mm.soft_emb_norm.weight": SOFT_NORM,
        },
    ),
    "lfm2": TowerNames(TOWER, TOWER + "encoder.layers.", _SIGLIP, _SIGLIP_LAYER, _projector("layer_norm")),
    "pixtral": TowerNames(
        TOWER, TOWER + "transformer.layers.", {"patch_embd": "patch_conv", "pre_ln": "ln_pre"}, _PIXTRAL_LAYER,
        _projector("norm") | {"mm.patch_merger.weight": PROJECTION + "patch_merger.merging_layer.weight"},
    ),
    "qwen2.5vl_merger": TowerNames(
        QWEN, QWEN + "blocks.", {**_QWEN, "post_ln": "merger.ln_q"},
        {**_QWEN_LAYER, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        _merger("mlp.0", "mlp.2"),
    ),
    "qwen3vl_merger": TowerNames(
        QWEN, QWEN + "blocks.", {**_QWEN, "post_ln": "merger.norm"},
        {**_QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        _merger("linear_fc1", "linear_fc2"),
    ),
}  # fmt: skip
OF_TEXT = ("v.token_embd.img_break",)  # tensors of the text model: a copy of a row of its embedding
BEHIND_LAYERS = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}  # connectors of Qwen3-VL ("deepstack")
LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(.+)")
STACKED = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(.+)")


def tower_name(name: str, projector: str) -> str:
    """Returns a tensor's Hugging Face name; "" if the tensor belongs to no tower, or to a tower that is not served.

    A tensor with an unknown name gets the tower's prefix, so that it is refused.
    """
    names = NAMES.get(projector)
    if names is None or not name.startswith(("v.", "mm.")) or name in OF_TEXT:
        return ""
    if found := names.connector.get(name):
        return found
    if one := LAYER.fullmatch(name):
        return f"{names.layers}{one[1]}.{names.layer.get(one[2], one[2])}.{one[3]}"
    if one := STACKED.fullmatch(name):
        return f"{names.before}deepstack_merger_list.{one[1]}.{BEHIND_LAYERS.get(one[2], one[2])}.{one[3]}"
    module, _, kind = name.removeprefix("v.").partition(".")
    return f"{names.before}{names.whole.get(module, module)}.{kind}"
