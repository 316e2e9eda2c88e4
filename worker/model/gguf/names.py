"""Which tensor of a GGUF file is which tensor of a Hugging Face checkpoint, by architecture."""

import re
from collections.abc import Mapping

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
SPECIAL: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}  # fmt: skip
NOT_READ = re.compile(
    r"rope_freqs\.weight|rope_factors_(short|long)\.weight"  # shared/gguf/config.py reads them
    r"|(v|mm)\..*"  # the vision part of a multimodal model, of which the text model is served
)
# The converter puts the two halves of each head of queries and keys into pairs, as llama.cpp rotates neighbours there.
PAIRED_ARCHITECTURES = ("llama", "smollm3")
PAIRED = re.compile(r".*\.self_attn\.[qk]_proj\.(weight|bias)")
# The converter adds 1 to Gemma's norms.
SHIFTED_ARCHITECTURES = ("gemma3",)
SHIFTED = re.compile(r".*norm\.weight")


def hugging_face_name(name: str, architecture: str) -> str:
    """Returns the name of a tensor. An unknown one keeps its name behind `model.`, so that it is refused."""
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
    found = (LAYER | dict(SPECIAL.get(architecture, {}))).get(layer[2]) if layer else None
    return f"model.layers.{layer[1]}.{found}.{kind}" if layer and found else f"model.{name}"


def is_paired(name: str, architecture: str) -> bool:
    """Whether the rows of this tensor, by its Hugging Face name, are paired."""
    return architecture in PAIRED_ARCHITECTURES and PAIRED.fullmatch(name) is not None


def is_shifted(name: str, architecture: str) -> bool:
    """Whether 1 has been added to this tensor, by its Hugging Face name."""
    return architecture in SHIFTED_ARCHITECTURES and SHIFTED.fullmatch(name) is not None
