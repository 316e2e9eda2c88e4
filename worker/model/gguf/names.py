"""Translates the names of tensors in GGUF files to the names in Hugging Face checkpoints, by architecture."""

import re
from collections.abc import Mapping

WHOLE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm", "token_embd_norm": "model.embedding_norm",
}  # fmt: skip
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
GEMMA = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
GEMMA4 = {
    **GEMMA, "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj",
}  # fmt: skip
ONLY_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"
}  # fmt: skip
BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
MTP_HEAD = {
    "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm", "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}  # fmt: skip
GLM4_MOE = {
    **BEFORE_MLP, **MTP_HEAD, "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
DELTA_NET = {
    **BEFORE_MLP, **MTP_HEAD, "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",  # old files of Qwen3-Next
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
LFM2 = {
    "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj",
}  # fmt: skip
SPECIAL: Mapping[str, Mapping[str, str]] = {
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "glm4": {
        "ffn_up": "mlp.gate_up_proj", "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "glm4moe": GLM4_MOE,
    "gpt-oss": BEFORE_MLP,
    "seed_oss": BEFORE_MLP,
    "olmo2": ONLY_POST_NORMS,
    "exaone4": ONLY_POST_NORMS,
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    "apertus": {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "lfm2": LFM2,
    "granitehybrid": MAMBA,
    "qwen3next": DELTA_NET,
    "qwen35": DELTA_NET,
    "qwen35moe": DELTA_NET,
}  # fmt: skip
# Tensors whose names end with `.weight` in GGUF but not in Hugging Face: sinks, and the stacked experts of a layer.
PARAMETERS = {
    "attn_sinks": "self_attn.sinks", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}  # fmt: skip
# Tensors that are parameters and not modules in Hugging Face, by their full name in GGUF.
NO_MODULES = {
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias", "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    "xielu.alpha_p": "mlp.act_fn.alpha_p", "xielu.alpha_n": "mlp.act_fn.alpha_n", "xielu.beta": "mlp.act_fn.beta",
    "xielu.eps": "mlp.act_fn.eps", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
MAMBA_PARAMETERS = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
BESIDE_MLP = ("gemma4",)  # architectures whose experts are not inside a module `mlp`
ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # old files of Mixtral
NOT_READ = re.compile(
    r"rope_freqs\.weight|rope_factors_(short|long)\.weight"  # shared/gguf/config/config.py reads them
    r"|(v|mm)\..*"  # a vision tower: see tower_names.py
)


def hugging_face_name(name: str, architecture: str) -> str:
    """Returns the Hugging Face name of a tensor. An unknown tensor gets the prefix `model.`, so that it is refused."""
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    found = _in_layer(layer[2], architecture) if layer else None
    return f"model.layers.{layer[1]}.{found}" if layer and found else f"model.{name}"


def _in_layer(name: str, architecture: str) -> str | None:
    parameters = NO_MODULES | (MAMBA_PARAMETERS if SPECIAL.get(architecture) is MAMBA else {})
    if name in parameters:
        return parameters[name]
    module, _, kind = name.rpartition(".")
    if parameter := PARAMETERS.get(module):
        parameter = parameter.removeprefix("mlp.") if architecture in BESIDE_MLP else parameter
        return parameter if kind == "weight" else f"{parameter}_{kind}"
    if expert := ONE_EXPERT.fullmatch(module):
        return f"mlp.experts.{expert[2]}.{expert[1]}_proj.{kind}"
    found = (LAYER | dict(SPECIAL.get(architecture, {}))).get(module)
    return found and f"{found}.{kind}"
